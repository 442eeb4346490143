"""Training on pairs of answers: micro-batches, their objective, what a step on some pairs needs, and pairs mixed into RL batches."""
