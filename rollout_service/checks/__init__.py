"""Checks before anything is computed: of tasks, weight folders and adapter folders.

May import errors only.
"""
