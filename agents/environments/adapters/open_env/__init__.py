"""Environments of OpenEnv servers (docs/environments_of_others.md)."""
