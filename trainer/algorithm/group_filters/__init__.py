"""Group filters: which whole groups are dropped when they arrive, each under a reason that is counted.

A filter is one file, found by its registry. To add one, copy a file such as `equal_rewards.py`.
"""
