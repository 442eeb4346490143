"""The code that runs inside the sandbox: standard library only, importable without the rest of the service."""
