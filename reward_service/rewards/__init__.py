"""The built-in rewards, one per file, pure: a completion and a ground truth give a `Verdict`; see `reward.py`."""
