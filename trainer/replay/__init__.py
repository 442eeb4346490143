"""Trains again from the stored groups of a run and compares every version; may import everything but commands."""
