"""The adapter for tokenizers: encoding, decoding, stop strings, the chat template.

A tokenizer is optional: without a tokenizer.json the engine serves token ids only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Items
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.protocol.errors import TemplateRefused
from penstock.rollout_service.embedded_engine.errors import RequestRefused

if TYPE_CHECKING:  # the worker's own process decodes too, and does not import torch
    from penstock.protocol.chat_template import ChatTemplate
    from penstock.rollout_service.embedded_engine.sequence import Sequence

_SPARE_TOKENS = 8  # a stop string is searched in as many tokens as it has UTF-8 bytes, plus these


class Text:
    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer  # noqa: PLC0415  (a token-only engine starts without it)

        path = folder / "tokenizer.json"
        self._tokenizer = Tokenizer.from_file(str(path)) if path.is_file() else None
        settings = folder / "tokenizer_config.json"
        self._settings: dict[str, Any] = json.loads(settings.read_text("utf-8")) if settings.is_file() else {}
        template = folder / "chat_template.jinja"
        self._template = template.read_text("utf-8") if template.is_file() else self._settings.get("chat_template")
        self._compiled: ChatTemplate | None = None  # compiled at the first chat

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        if self._tokenizer is None:
            raise RequestRefused("this model folder holds no tokenizer.json; send input_ids instead of text")
        return self._tokenizer.encode(text, add_special_tokens=special).ids

    def decode(self, batch: Items[Items[int]], *, skip_special_tokens: bool) -> list[str]:
        """Return the text of each row of token ids; empty strings without a tokenizer."""
        if self._tokenizer is None:
            return [""] * len(batch)
        return self._tokenizer.decode_batch(batch, skip_special_tokens=skip_special_tokens)

    def eos_token_ids(self) -> tuple[int, ...]:
        """Return the tokenizer's own end token, at which SGLang stops too."""
        token = self._settings.get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        token_id = self._tokenizer.token_to_id(text) if self._tokenizer is not None and text else None
        return () if token_id is None else (token_id,)

    def find_stop_string(self, sequence: Sequence) -> str | None:
        stops = sequence.sampling.stop_strings
        window = max(len(stop.encode()) for stop in stops) + _SPARE_TOKENS
        tail = self.decode([sequence.output_ids[-window:]], skip_special_tokens=False)[0]
        return next((stop for stop in stops if stop in tail), None)

    def render_chat(self, messages: list[dict[str, Any]]) -> str:
        if self._template is None:
            raise RequestRefused("this model folder holds no chat template; use /generate")
        from penstock.protocol.chat_template import ChatTemplate  # noqa: PLC0415  (only chat needs jinja2)

        special = {key: value for key, value in self._settings.items() if key.endswith("_token")}
        names = {key: value["content"] if isinstance(value, dict) else value for key, value in special.items()}
        try:
            self._compiled = self._compiled or ChatTemplate(self._template)
            return self._compiled.render(messages, add_generation_prompt=True, tools=None, **names)
        except TemplateRefused as error:
            raise RequestRefused(f"the chat template refuses the conversation: {error}") from error
