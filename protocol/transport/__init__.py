"""The two doors out of a process: `bus` is the only importer of nats, `blobs` the only one of minio."""
