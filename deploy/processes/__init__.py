"""Child processes that stop with their parent, and the servers that run as such."""
