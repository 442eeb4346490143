"""Inference engines behind one interface: attached by URL, managed as child processes, or several as a pool.

May import checks. A kind of engine is one package below, or one file; see `engine_kind.py`.
"""
