"""Publishes weights: snapshot, compare, store, announce; and collects the garbage.

May import only the trainer's root.
"""
