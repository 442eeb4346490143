"""The model families that are served on a CPU: naming them spares SGLang the import of all others."""

from penstock_sglang_models import ordinary_memory  # noqa: F401  (imported for what it does)
