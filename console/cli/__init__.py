"""The `penstock` command: verbs, options and help texts; may import every package of the console."""
