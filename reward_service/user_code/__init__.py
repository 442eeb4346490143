"""A user's own reward code: loaded, called, and run in processes of its own.

`user_file`, `user_function` and `worker` execute user code; the service itself imports `worker_pool` alone.
May import rewards, graders (for their processes) and the wire types of endpoints.
"""
