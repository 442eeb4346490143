"""One optimizer step on all ranks: plan, forward, backward, critic, reference.

May import publishing, algorithm and data.
"""
