"""The built-in rewards, one a file, pure: completion and ground truth in, `Verdict` out; `reward.py` describes such a file."""
