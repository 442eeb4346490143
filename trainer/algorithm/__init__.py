"""The mathematics, pure: losses, advantages, corrections, KL, and the objective made of them.

May import no other package of the trainer.
"""
