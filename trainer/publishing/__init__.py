"""Weights out of the trainer: snapshot, compare, store, announce, collect garbage.

May import only the trainer's root.
"""
