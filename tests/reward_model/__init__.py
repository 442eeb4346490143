"""Tests of the served reward model."""
