"""The connections of a process: `bus` to NATS, `blobs` to S3.

Only this package imports `nats`, and only `s3_client` imports `minio`. The parts of `bus`:

    loop_thread      the thread it runs in, and the results of its calls
    nats_connection  the connection they share: retries, deadlines, errors, behaviour while NATS is unreachable
    fact_publisher   publish a fact              delivery, inbox    fetch facts, hold and acknowledge them
    key_value        a bucket                    tail               watch a stream, and read one without a consumer
    stream_admin     create, query and delete streams and consumers
"""
