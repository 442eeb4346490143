"""Losses on pairs of answers, one file per kind, found by their registry; pure.

A loss reads `Pairs`, sums of log-probabilities over whole answers, and returns one value per pair. Each names its formula,
its options and its source. `combined` weighs several of them. The files import torch at its first use.
"""
