"""Environments that a server plays (docs/environments_over_http.md): the bodies of the protocol, and the worker's side of it."""
