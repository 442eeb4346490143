"""Evaluates held-out prompts on a published version while training continues.

May import telemetry, groups, publishing and data.
"""
