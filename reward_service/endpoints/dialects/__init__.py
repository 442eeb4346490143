"""The languages in which endpoints want to be asked; `spoken.py` lists them by name."""
