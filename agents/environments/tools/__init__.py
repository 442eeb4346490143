"""The environment `tools`: Penstock's loop of answers and calls of tools; a new tool is one file (`tool.py`)."""
