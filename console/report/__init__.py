"""The report of a finished run: summary, curves, plot."""
