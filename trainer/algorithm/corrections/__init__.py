"""What stale and mismatched data need: importance weights, rejections, trust regions; pure.

How far data are from the policy in training is measured in `trainer/algorithm/mismatch.py`.

Everything here is detached. A weight multiplies a token's loss **before** aggregation, and a rejected
token weighs 0: the denominators keep counting it, so that a batch half of which is rejected moves the
weights half as far. A correction is one file, found by its registry; to add one, copy a file such as `veto.py`.
"""
