"""What only a real SGLang can show; ``make test-sglang``."""
