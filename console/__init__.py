"""The `penstock` command: start services, watch, report on, audit and replay runs.

Only `cli` imports other packages than `protocol`: a verb calls the function that does its work. Services start as
processes of the same interpreter; the rest of the console reads a run through NATS and S3 like any other client.
"""
