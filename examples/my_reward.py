"""A reward of your own: serve it, then ask for it by name.

penstock reward serve examples/my_reward.py --register http://127.0.0.1:8700
penstock train run.toml reward.name=my_reward
"""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Full marks for the right digits in order; a share of them for the places that are right.

    Return a number, or a dict with "score" and more numbers: they show up as named parts of the reward.
    Raise when an answer cannot be judged: the group then waits and is tried again. An error is never a 0.
    """
    wanted, given = str(ground_truth).split(), solution_str.split()
    right = sum(a == b for a, b in zip(wanted, given, strict=False))
    return {"score": float(given == wanted), "share_right": right / len(wanted), "num_words": len(given)}
