"""A user's reward code: loaded, and called in a separate process.

`user_file`, `user_function` and `worker` execute user code; the service itself imports none of them.
May import rewards, graders (for their processes) and the wire types of endpoints.
"""
