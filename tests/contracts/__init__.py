"""Tests of a contract that several implementations keep; each runs against all that are at hand."""
