"""What a training will need, from its settings and the shape of its model alone: no torch, no weights, no process started.

May import settings, errors and the planner of micro-batches.
"""
