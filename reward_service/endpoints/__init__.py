"""Registered HTTP reward endpoints: registry, queue, breaker, call, dialects; may import scores and errors."""
