"""Run files: one TOML file for all services, overrides, aliases of other systems' keys.

May import transport and the protocol's root.
"""
