"""SGLang: servers at a URL (``sglang-url``) and servers that the worker starts (``sglang``)."""
