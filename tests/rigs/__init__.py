"""Proofs, fuzzers and what they need: runs that take minutes or hours, too long for the suite, which runs some of them small."""
