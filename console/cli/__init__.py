"""The `penstock` command: its verbs as they are typed; may import every package of the console."""
