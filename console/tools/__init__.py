"""Commands on runs, rewards, dead letters, models and this machine; may import live and report."""
