"""Runs of a `penstock console`: requests to its Runs API, its events, and the backend of the handles."""
