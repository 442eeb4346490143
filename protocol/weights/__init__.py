"""Published versions: manifests, buckets, patches, adapters, digests; imports transport and the root modules of protocol."""
