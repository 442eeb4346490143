"""What people touch: the `penstock` command, the live panel, the report, `doctor`, `chat` and `runs`.

The console imports `protocol` and no service: it starts services as processes of the same
interpreter, and watches a run through NATS like any other reader.
"""
