"""The built-in tools, each found by its name; a new one is one file."""
