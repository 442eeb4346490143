"""The `penstock` command: start services, watch, report on, audit and replay runs.

The console imports `protocol` and no service. It starts services as processes of the same
interpreter and reads a run through NATS and S3 like any other client.
"""
