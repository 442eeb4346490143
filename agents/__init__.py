"""Environments of several turns, their hosting, and the token-exact proxy of agents; may import rollout_service, serving and protocol. Read `README.md`."""
