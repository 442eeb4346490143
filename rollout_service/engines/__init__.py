"""Inference engines behind one interface: attached by URL, managed as child processes, or several as a pool.

May import checks.
"""
