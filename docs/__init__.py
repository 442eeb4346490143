"""The documentation: pages, and what writes parts of them from the code."""
