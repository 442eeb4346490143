"""Run untrusted Python programs in isolation, for any service; see README.md in this folder. May import `protocol.errors` alone."""
