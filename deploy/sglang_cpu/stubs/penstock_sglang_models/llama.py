"""SGLang's own implementation of Llama."""

from sglang.srt.models.llama import EntryClass

__all__ = ["EntryClass"]
