"""What makes a run resumable: lease, checkpoint, run record, garbage collection of groups.

May import groups and what is below it.
"""
