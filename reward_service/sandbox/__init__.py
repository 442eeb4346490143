"""Run untrusted programs in isolation; see README.md in this folder."""
