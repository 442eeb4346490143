"""The live panel of a run: heartbeats and events folded into snapshots, and drawn; may import report."""
