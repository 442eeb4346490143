"""The rollout worker: takes tasks, samples groups from an engine, stores and announces them, follows weights."""
