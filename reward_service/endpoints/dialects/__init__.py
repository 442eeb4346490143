"""The request and response formats of endpoints; `DIALECTS` finds them by name."""
