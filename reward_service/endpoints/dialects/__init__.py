"""The request and response formats of endpoints, one file each; `DIALECTS` finds them by name."""
