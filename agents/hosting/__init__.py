"""Serve, list and try environments: ``penstock env`` (docs/environments_over_http.md). May import the environments."""
