"""Advantage estimators: from the rewards of a batch to what each trajectory, or each of its tokens, is credited with.

A registered estimator is one file and gives one advantage per trajectory, which the loss spreads over its sampled
tokens; it sees the whole batch as `Outcomes`. To add one, copy a file such as `rloo.py`.

Groups of one, groups of equal rewards and trajectories without tokens give 0 or a plain reward, as each function
says; never NaN, and never rounding noise that a division makes large.
"""
