"""The request and response formats of endpoints; `spoken.py` lists them by name."""
