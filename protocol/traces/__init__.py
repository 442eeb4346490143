"""OpenTelemetry traces: one for each group, through all services; off unless a collector is configured."""
