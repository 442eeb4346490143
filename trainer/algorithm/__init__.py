"""Losses, advantage estimators, filters, corrections, KL, and the objective made of them; pure.

May import no other package of the trainer.
"""
