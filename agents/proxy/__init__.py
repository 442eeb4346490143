"""The token-exact proxy: an agent's OpenAI-compatible URL, whose sampled tokens are the ones that are trained on.

May import engines, checks and errors. Everything but `api/`, `calls.py` and `server.py` is pure. See README.md.
"""
