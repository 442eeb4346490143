"""What the trainer reports: metrics of a step, events, heartbeat; may import learner and algorithm."""
