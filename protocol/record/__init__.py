"""The record of a run: what each checkpoint adds to it, and how it is read back.

May import transport and the protocol's root.
"""
