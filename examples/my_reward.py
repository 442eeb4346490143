"""A user-defined reward: serve it and request it by name, or name the file in the run file.

penstock reward serve examples/my_reward.py --register http://127.0.0.1:8700
penstock train run.toml reward.name=my_reward

or without a server, from this folder:  penstock train run.toml reward.name=my_reward.py:compute_score
"""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return 1 for the right digits in order; part ``share_right`` is the share of positions that are right.

    Return a number, or a dict with "score" and more numbers: they become named parts of the reward.
    Raise when an answer cannot be judged: the group is then retried. An error is never a 0.
    """
    wanted, words = str(ground_truth).split(), solution_str.split()
    right = sum(a == b for a, b in zip(wanted, words, strict=False))
    return {"score": float(words == wanted), "share_right": right / len(wanted), "num_words": len(words)}
