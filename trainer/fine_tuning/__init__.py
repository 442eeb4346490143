"""Training on given answers, without rollouts and services: `penstock sft`, `penstock dpo`, `penstock rm`.

`loop` makes the steps, validations and checkpoints of any `Task`; `sft`, `dpo` and `rm` are tasks; `length` and `early_stop`
decide, and are pure; `checkpoints` and `training_folder` hold what is on disk. Every rank reads the same data and computes the
same plan, so the ranks exchange sums alone, and rank 0's decision to write a checkpoint or to stop.
"""
