"""Prometheus beside a run: its configuration, alerts, and the addresses of the run's services."""
