"""How a run is started where: one file for each launcher, listed in `registry.py`."""
