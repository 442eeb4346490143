"""Environments of other libraries, one file for each; a library is imported when an environment of it is played, not before."""
