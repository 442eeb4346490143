"""The built-in rewards, one a file, pure: completion and ground truth in, `Verdict` out."""
