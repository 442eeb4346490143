"""SGLang: its HTTP contract, its command line and its settings."""
