"""The connections of a process: `bus` to NATS, `blobs` to S3.

Only this package imports `nats`, and only `s3_client` imports `minio`. The parts of `bus`:

    pending          the thread it runs in, and the results of its calls
    nats_connection  the connection they share: retries, deadlines, behaviour while NATS is unreachable
    fact_publisher   publish a fact              delivery, inbox    fetch facts, hold and acknowledge them
    key_value        a bucket                    tail                           watch a stream
    direct_get       read a stream without a consumer
    stream_admin     create, query and delete streams and consumers
    nats_errors      errors for JetStream's answers
"""
