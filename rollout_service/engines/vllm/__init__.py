"""vLLM: servers at a URL (``vllm-url``) and servers that the worker starts (``vllm``)."""

from penstock.rollout_service.engines.vllm.kind import VLLM, VLLM_URL

__all__ = ["VLLM", "VLLM_URL"]
