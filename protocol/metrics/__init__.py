"""Prometheus metrics of all services: their table, the samples of a scrape, and the page that Prometheus reads."""
