"""Published versions: manifests, buckets, patches, adapters, digests; may import transport and the protocol's root."""
