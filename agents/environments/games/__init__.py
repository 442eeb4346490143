"""The built-in games and tasks, each found by its name; a new one is one file."""
