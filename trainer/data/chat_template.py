"""Renders chats to text and token ids: the adapter of `tokenizers` and `jinja2`, without transformers and torch.

Reads a model folder as transformers 5 saves it: ``tokenizer.json``, ``tokenizer_config.json``, and the
template in ``chat_template.jinja`` (or, as older versions saved it, in ``tokenizer_config.json``). The result equals
``AutoTokenizer.from_pretrained(folder).apply_chat_template(...)``, which a test checks. As there, the text of a
control token in a message becomes that control token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from penstock.trainer.errors import MalformedData, UnsupportedModel

Message = Mapping[str, Any]

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTokenizer:
    """Renders chats with a model's own template and turns text into token ids."""

    def __init__(
        self, tokenizer: Tokenizer, template: jinja2.Template, special_tokens: Mapping[str, str], eos_ids: Sequence[int]
    ) -> None:
        """Hold the parts. Called by `read`."""
        self._tokenizer = tokenizer
        self._template = template
        self._special_tokens = dict(special_tokens)
        self.eos_ids: tuple[int, ...] = tuple(eos_ids)
        """Token ids that end a completion, the tokenizer's own first."""

    @classmethod
    def read(cls, folder: Path) -> ChatTokenizer:
        """Read a model folder; raises UnsupportedModel naming the file that is missing or invalid."""
        if not folder.is_dir():
            raise UnsupportedModel(f"model.path = {folder}: no such folder; set it to a Hugging Face model folder")
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise UnsupportedModel(
                f"{path}: missing; save the model's tokenizer with `save_pretrained` of transformers, which writes it"
            )
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as err:  # noqa: BLE001 - the Rust library raises plain Exception
            raise UnsupportedModel(f"{path}: not a tokenizer ({err}); save it again with transformers") from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config = _read_json(folder / "tokenizer_config.json")
        special_tokens = {name: _token_text(config[name]) for name in _SPECIAL_TOKENS if config.get(name)}
        template = _compile(_template_text(folder, config), folder)
        return cls(tokenizer, template, special_tokens, _eos_ids(folder, tokenizer, special_tokens.get("eos_token")))

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """Render a chat as text; raises MalformedData if the template refuses it."""
        try:
            return self._template.render(
                messages=[{key: value for key, value in message.items() if value is not None} for message in messages],
                tools=[],
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as err:
            raise MalformedData(f"the model's chat template refuses the chat: {err}") from None

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without adding special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of several texts, using all cores."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encoded]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as err:
        raise UnsupportedModel(f"{path}: not JSON ({err}); restore the file") from None
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{path}: expected a JSON object, got {type(content).__name__}; restore the file")
    return content


def _token_text(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _template_text(folder: Path, config: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    if not isinstance(template, str):
        raise UnsupportedModel(
            f"{folder}: no chat template; add chat_template.jinja, or use the folder of the instruction-tuned model"
        )
    return template


def _eos_ids(folder: Path, tokenizer: Tokenizer, eos_token: str | None) -> list[int]:
    found: list[int] = []
    own = tokenizer.token_to_id(eos_token) if eos_token else None
    if own is not None:
        found.append(own)
    for name in ("generation_config.json", "config.json"):
        declared = _read_json(folder / name).get("eos_token_id")
        if declared is not None:
            found += declared if isinstance(declared, list) else [declared]
            break  # generation_config overrules config, as in transformers' generate
    if not found:
        raise UnsupportedModel(
            f"{folder}: no end-of-sequence token in tokenizer_config.json, generation_config.json or config.json; "
            "a completion would never end; set eos_token_id in config.json"
        )
    return list(dict.fromkeys(found))


class _GenerationBlocks(Extension):
    """Renders the content of ``{% generation %}`` blocks, with which templates mark assistant turns."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares tags

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Return the statements inside the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(text: str, folder: Path) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols], autoescape=False
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(text)
    except jinja2.TemplateError as err:
        raise UnsupportedModel(f"{folder}: the chat template is not valid Jinja ({err}); fix or replace it") from None


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # The filter of jinja2 escapes HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
