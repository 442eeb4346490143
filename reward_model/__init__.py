"""A reward model as an endpoint: a sequence classifier of transformers, served as ``penstock reward serve-model``.

A separate process, so that the reward service needs no torch; they communicate over HTTP like all endpoints.
Read `README.md`.
"""
