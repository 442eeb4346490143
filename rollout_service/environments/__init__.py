"""Environments: each turns the tasks of a pack into trajectories by talking to the engine in its own way."""
