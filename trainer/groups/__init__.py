"""Which groups are issued, what comes back, and which of it is trained.

May import learner.step_plan, algorithm and data.
"""
