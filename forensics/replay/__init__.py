"""Trains a run again from its stored groups and compares every version; may import the trainer and the protocol."""
