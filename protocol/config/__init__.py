"""Run files: one TOML file for all services, overrides, aliases of other systems' keys.

Imports the root modules of protocol; `transport` imports `config.connection`.
"""
