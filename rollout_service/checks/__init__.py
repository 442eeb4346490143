"""Refusals before anything is computed: tasks, weight folders and adapter folders that do not fit; pure."""
