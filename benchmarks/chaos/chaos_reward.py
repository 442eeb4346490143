"""The reward of the chaos run, served as an endpoint of its own: a share of the places that are right.

Unlike exact match it tells even an untrained model's completions apart, so that every step moves the weights.
"""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return the share of the digits that stand where they belong."""
    right = sum(a == b for a, b in zip(str(ground_truth), solution_str, strict=False))
    return right / len(str(ground_truth))
