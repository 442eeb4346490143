"""What the page draws: readers of a run's figures, bounded in time, memory and bytes read."""
