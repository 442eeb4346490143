"""What survives a crash: lease, checkpoint, run record, garbage collection of groups.

May import groups and learner.step_plan.
"""
