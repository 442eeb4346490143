"""The model families that are served on a CPU: naming them spares SGLang the import of all others."""
