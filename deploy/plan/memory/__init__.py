"""What a training will need, from its settings and the shape of its model alone: no torch, no weights, no process started.

May import the trainer's settings, its errors and its planner of micro-batches.
"""
