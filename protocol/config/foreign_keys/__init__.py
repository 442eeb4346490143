"""Keys of verl, TRL, ROLL, OpenRLHF, AgentRL and slime, one module of data for each; imports nothing else of Penstock.

Each module has four tables: ``TAKEN`` (a key with exactly the same meaning: the settings it sets), ``RENAMED`` (a key with
another meaning or other values: the setting to use), ``ABSENT`` (why there is none, and what does its work) and
``PREFIXES`` (the same for all keys that begin so). `protocol/config/foreign_config.py` joins them.
"""
