"""Environments of several turns, games, tools and adapters of other libraries; may import the proxy and rollout_service."""
