"""What callers and servers of HTTP endpoints share: which addresses may be called, signatures, JSON with one reading."""
