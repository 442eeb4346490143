"""``penstock eval``: one model on separate prompts, through a reward service and workers that run for it alone."""
