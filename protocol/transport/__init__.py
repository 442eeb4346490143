"""The two doors out of a process: `bus` to NATS, `blobs` to S3.

`nats` is imported by no file outside this package, `minio` only by `blobs`, `obstore` only by `short_way`, which `blobs` takes for whole
small objects. What `bus` is made of:

    pending          the thread it lives in, and the results it owes
    nats_connection  the connection all of these share: retries, deadlines, what happens while NATS is away
    publication      a fact goes out             delivery, inbox, pull    facts come in and are held
    key_value        a bucket                    tail                     a stream is watched
    stream_admin     streams and consumers are created, asked and deleted
"""
