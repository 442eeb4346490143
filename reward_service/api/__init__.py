"""The HTTP API: routes, models, metrics page, and the web server; may import registry and endpoints."""
