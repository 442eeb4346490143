"""SGLang: servers at a URL (``sglang-url``) and servers that the worker starts (``sglang``)."""

from penstock.rollout_service.engines.sglang.kind import SGLANG, SGLANG_URL

__all__ = ["SGLANG", "SGLANG_URL"]
