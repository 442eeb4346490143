"""``penstock eval``: one model on prompts of its own, through a reward service and workers that run for it alone."""
