"""HTTP servers that register themselves, and calls to them: addresses, signatures, connections, the server, leases; imports protocol alone."""
