"""The trainer: issues tasks, collects scored groups, trains, publishes weights.

In: `GroupScored` and the groups it names. Out: `TaskIssued`, `WeightsPublished`. Configuration, data and dispatch import
no torch; `trainer/learner/trainable.py` is the only file that imports DeepSpeed.
"""
