"""Grader processes: rewards that may hang or crash run here, one job at a time; may import rewards."""
