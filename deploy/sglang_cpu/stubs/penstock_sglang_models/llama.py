"""SGLang's implementation of Llama."""

from sglang.srt.models.llama import EntryClass

__all__ = ["EntryClass"]
