"""HTTP servers that register themselves, and calls to them: addresses, signatures, connections, leases."""
