"""The environment `tools`: our own loop of answers and calls of tools; a new tool is one file (`tool.py`)."""
