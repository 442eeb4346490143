"""Write a run's metrics to experiment trackers; imports the record, the live view's event fields and protocol."""
