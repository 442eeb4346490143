"""One file for each tracker, the only importer of its library; imports the interface of `tracking` and protocol."""
