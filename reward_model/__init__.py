"""A reward model as an endpoint: a sequence classifier of transformers, served as ``penstock reward serve-model``.

A process of its own, so that torch stays out of the reward service: it meets it over HTTP like every other endpoint.
Read `README.md`.
"""
