"""vLLM: servers at a URL (``vllm-url``) and servers that the worker starts (``vllm``)."""
