"""SGLang's implementation of Qwen2."""

from sglang.srt.models.qwen2 import EntryClass

__all__ = ["EntryClass"]
