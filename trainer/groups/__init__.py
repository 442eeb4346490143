"""Which groups are issued, how they arrive, and which of them are trained.

May import learner.step_plan, data, algorithm and the root's settings.
"""
