"""Attention over packed rows: one function for transformers, a backend for each device, and the models it is exact for.

May import what `learner` may.
"""
