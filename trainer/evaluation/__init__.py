"""Evaluates held-out prompts on a published version while training goes on; may import groups, publishing and data."""
