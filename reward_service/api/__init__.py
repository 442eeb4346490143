"""The HTTP API: routes, models, metrics page; may import registry and endpoints."""
