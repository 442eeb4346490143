"""What the trainer reports: metrics of a step, events, heartbeat; may import groups and what is below it."""
