"""Trains a run again from its stored groups and compares every version; may import every package except commands."""
