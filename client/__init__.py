"""The Python interface: start, follow and steer runs from a program or a notebook; imports no torch.

`client` and `async_client` are what users call, `handles` what they get. A handle has a backend:
`local_backend` starts processes on this machine. May import every package but the trainer's and engines' torch code.
"""
