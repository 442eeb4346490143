"""Losses as pure functions on flat [N] tensors of sampled tokens; a policy loss is one file, found by its registry.

A policy loss reads `Tokens` and returns its value for every token before aggregation
(`trainer/algorithm/aggregation.py` weighs the tokens), with what the step reports about it. To add one, copy a file
such as `cispo.py`: the function with its formula, its options, its source and its presets. Nothing else changes.
The files import torch at its first use (`trainer/algorithm/lazy_torch.py`), since settings are read from them.
"""
