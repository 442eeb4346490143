"""Environments of NeMo-Gym resources servers (docs/environments_of_others.md)."""
