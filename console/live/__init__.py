"""The live panel of a run: fold heartbeats and events into snapshots and draw them; may import report."""
