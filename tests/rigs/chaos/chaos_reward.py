"""The reward of the chaos run, served as a separate endpoint: the fraction of digits at the right position.

Unlike exact match it differs between the completions of an untrained model too, so that every step changes the weights.
"""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return the fraction of digits at their right position."""
    right = sum(a == b for a, b in zip(str(ground_truth), solution_str, strict=False))
    return right / len(str(ground_truth))
