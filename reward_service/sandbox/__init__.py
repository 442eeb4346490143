"""Untrusted programs, run where they can do no harm; see README.md in this folder."""
