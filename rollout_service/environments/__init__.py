"""Environments: each turns the tasks of a pack into trajectories by sampling from the engine.

May import engines and checks. One file each; see `environment.py`.
"""
