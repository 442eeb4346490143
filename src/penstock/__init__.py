"""Asynchronous reinforcement learning of language models: services that meet only on NATS and S3.

Every package of Penstock is below this name. The folders themselves stand at the top of the repository;
the links beside this file give them their names.
"""

__version__ = "0.1.0"
