"""Runs that the API created: their files, their state, the queue of this machine, and the steps that change them."""
