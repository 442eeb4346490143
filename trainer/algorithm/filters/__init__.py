"""Trajectory filters: which trajectories of a batch are left out of the loss, each under a reason that is counted.

A filter is one file, found by its registry. To add one, copy a file such as `success_turns.py`.
"""
