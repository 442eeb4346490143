"""One optimizer step on all ranks: plan, policy, critic, reference; and the copies of weights that are published.

May import publishing, algorithm and data.
"""
