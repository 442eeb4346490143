"""Renders chats to text and token ids: the adapter of `tokenizers`, without transformers and torch.

Reads a model folder as transformers 5 saves it: ``tokenizer.json``, ``tokenizer_config.json``, and the
template in ``chat_template.jinja`` (or, as older versions saved it, in ``tokenizer_config.json``). The result equals
``AutoTokenizer.from_pretrained(folder).apply_chat_template(...)``, which a test checks. As there, the text of a
control token in a message becomes that control token.

The trainer renders its prompts with it, and the rollout worker what lies between two sampled answers.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from penstock.protocol.call_arguments import ArgumentsForm, arguments_form, with_arguments
from penstock.protocol.chat_template import MAX_TEMPLATE_CHARS, ChatTemplate
from penstock.protocol.control_tokens import ControlTokens
from penstock.protocol.errors import MalformedData, TemplateRefused, UnsupportedModel
from penstock.protocol.model_folder import read_object
from penstock.protocol.tokenizer_file import is_of_library, load_tokenizer

Message = Mapping[str, Any]
_T = TypeVar("_T")

_MAX_TOKEN_IDS = 2**31
_ANSWER = {"role": "assistant", "content": "SEAM"}

_ORDINARY_TAGS = re.compile(r"think|tool_call|tool_response|image", re.IGNORECASE)  # of answers; images are counted
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTokenizer:
    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        special_tokens: Mapping[str, str],
        eos_ids: Sequence[int],
        vocabulary: int | None = None,
        context_tokens: int | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self._arguments = dict(arguments or {})
        self.context_tokens = context_tokens
        """Most tokens of a prompt and its completion; None if the model's configuration does not tell."""
        self._tokenizer = tokenizer
        self._template = template
        self._special_tokens = dict(special_tokens)
        self.eos_ids: tuple[int, ...] = tuple(eos_ids)
        """Token ids that end a completion, the tokenizer's first."""
        ids = tokenizer.get_vocab(with_added_tokens=True).values()
        # None: no check
        self._limit = vocabulary if vocabulary is not None and max(ids, default=0) >= vocabulary else None

    @classmethod
    def read(
        cls, folder: Path, *, arguments: Mapping[str, Any] | None = None, needs_template: bool = True
    ) -> ChatTokenizer:
        """Read a model folder; raises UnsupportedModel naming the file that is missing or invalid.

        ``arguments`` are passed to the template. Without one a model is refused only if it ``needs_template``.
        """
        if not folder.is_dir():
            raise UnsupportedModel(
                f"model.path = {folder}: no such folder; set it to a Hugging Face folder or a GGUF file"
            )
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise UnsupportedModel(
                f"{path}: missing; save the model's tokenizer with `save_pretrained` of transformers, which writes it"
            )
        tokenizer = load_tokenizer(path)
        config = read_json(folder / "tokenizer_config.json")
        special_tokens = special_tokens_of(config, folder)
        template = _template(folder, config, arguments or {}, needs_template=needs_template)
        vocabulary = _vocabulary(folder)
        eos_ids = _eos_ids(folder, tokenizer, special_tokens.get("eos_token"), vocabulary)
        return cls(tokenizer, template, special_tokens, eos_ids, vocabulary, model_context_tokens(folder), arguments)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool, tools: Sequence[Any] = ()) -> str:
        """Render a chat as text; raises MalformedData if the template refuses it, or if the model has none."""
        if self._template is None:
            raise MalformedData(
                "the prompt is a chat, and the model has no chat template; give a text, or add chat_template.jinja"
            )
        return self._filled(self._template.render, messages, tools, prompt=add_generation_prompt)

    @property
    def marks_answers(self) -> bool:
        return self._template is not None and self._template.marks_answers

    def render_marked(self, messages: Sequence[Message], *, tools: Sequence[Any] = ()) -> list[tuple[str, bool]]:
        """Return a chat's texts, each with whether the template marks it; raises MalformedData as `render` does."""
        if self._template is None or not self._template.marks_answers:
            raise MalformedData(
                'the chat template marks no answers with {% generation %}; use one that does, or set sft.mask = "turns"'
            )
        return self._filled(self._template.render_marked, messages, tools, prompt=False)

    def _filled(
        self, render: Callable[..., _T], messages: Sequence[Message], tools: Sequence[Any], *, prompt: bool
    ) -> _T:
        messages = self.with_arguments(messages)
        try:
            return render(messages, **self._names(tools, prompt=prompt))
        except TemplateRefused as err:
            is_bare = "has no attribute 'function'" in str(err)
            fix = (
                '; write each of tool_calls as {"type": "function", "function": {"name": …, "arguments": …}}'
                if is_bare
                else ""
            )
            raise MalformedData(f"the model's chat template refuses the chat: {err}{fix}") from None

    def _names(self, tools: Sequence[Any] = (), *, prompt: bool = False) -> dict[str, Any]:
        """Return what a template reads besides the messages.

        As in transformers, tools are None without any: a template may tell that from an empty list.
        """
        of_call = {"tools": list(tools) or None, "documents": None, "add_generation_prompt": prompt}
        return {**of_call, **self._special_tokens, **self._arguments}

    def with_arguments(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages whose calls have their arguments as the template writes them, an object or a JSON text."""
        if self._template is None or not any(message.get("tool_calls") for message in messages):
            return messages
        return with_arguments(messages, self._arguments_form)

    @cached_property
    def _arguments_form(self) -> ArgumentsForm:
        assert self._template is not None
        return arguments_form(partial(self._template.render, **self._names()))

    @cached_property
    def tags_tool_results(self) -> bool:
        """Whether the template writes a tool's result between ``<tool_response>`` tags."""
        return "<tool_response>" in self._shown({"role": "tool", "content": "SEAM", "tool_call_id": "call00001"})

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """Added tokens that are marked as special, end a text, or are written by the template around its messages."""
        ids = (*self.eos_ids, *map(self._tokenizer.token_to_id, self._special_tokens.values()))
        chat = self._shown(_ANSWER)
        texts = [
            token.content
            for number, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
            or number in ids
            or (len(token.content.strip()) > 2 and not token.content.isalnum() and token.content in chat)
        ]
        return ControlTokens((text for text in texts if not _ORDINARY_TAGS.search(text)), self.encoder_of_plain_text)

    def encode_escaped(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of texts in which `ControlTokens.escaped` may have replaced those of control tokens."""
        encoded = self.encode_many(texts)
        for number, text in enumerate(texts):
            if self.control_tokens.has_escaped(text):
                encoded[number] = self._checked(self.control_tokens.encode(text, self.encode))
        return encoded

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a text; ``add_special_tokens`` adds those at the beginning of a text, such as BOS."""
        with _refusing_panics():
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        ids = encoding.ids
        # some tokenizers end every text
        while add_special_tokens and ids and encoding.special_tokens_mask[len(ids) - 1]:
            ids.pop()
        return self._checked(ids)

    def lost_characters(self, text: str) -> set[str]:
        """Return those of a text that are part of no token, or of the unknown one; white space does not count."""
        unknown_text = self._special_tokens.get("unk_token", "")  # some models begin a text with it
        unknown = self._tokenizer.token_to_id(unknown_text)
        with _refusing_panics():
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        kept = {
            place
            for number, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
            if number != unknown or text[start:end] == unknown_text
            for place in range(start, end)
        }
        return {character for place, character in enumerate(text) if place not in kept and not character.isspace()}

    def begins_twice(self, ids: Sequence[int]) -> bool:
        """Return True if a text that was encoded with BOS had one already."""
        first = self._beginning
        return bool(first) and list(ids[: 2 * len(first)]) == 2 * first

    @cached_property
    def _beginning(self) -> list[int]:
        text = "a"
        return self.encode(text, add_special_tokens=True)[: -len(self.encode(text)) or None]

    def endless_turn(self) -> str:
        """Return what the template writes after an answer; empty if an end token is in it, or it cannot be seen."""
        _, marker, behind = self._shown(_ANSWER).rpartition("SEAM")
        is_ended = not marker or not behind.strip() or any(token in self.eos_ids for token in self.encode(behind))
        return "" if is_ended else behind.strip()

    def _shown(self, second: Message) -> str:
        """Return a chat of a user's message and a second one as the template writes it; empty if it refuses it."""
        try:
            return self.render([{"role": "user", "content": "u"}, second], add_generation_prompt=False)
        except MalformedData:
            return ""

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of several texts, using all cores."""
        with _refusing_panics():
            encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._checked(encoding.ids) for encoding in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        with _refusing_panics():
            return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def added_tokens(self) -> dict[str, int]:
        """Return the texts that are one token wherever they stand, control tokens among them, with their ids."""
        return {token.content: number for number, token in self._tokenizer.get_added_tokens_decoder().items()}

    def encoder_of_plain_text(self) -> Tokenizer:
        """Return a copy of the tokenizer that knows no added tokens: a control token is ordinary text to it."""
        described = json.loads(self._tokenizer.to_str())
        described["added_tokens"] = []
        described["post_processor"] = None
        with _refusing_panics():
            return Tokenizer.from_str(json.dumps(described))

    def decode_many(self, rows: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        with _refusing_panics():
            return self._tokenizer.decode_batch(list(rows), skip_special_tokens=skip_special_tokens)

    def _checked(self, ids: list[int]) -> list[int]:
        if self._limit is not None and ids and max(ids) >= self._limit:
            token = self._tokenizer.id_to_token(max(ids))
            raise MalformedData(
                f"token {token!r} has id {max(ids)}, and the model's vocabulary is {self._limit}: the tokenizer "
                "is of another model, or has added tokens; use the model's own, or a text without this token"
            )
        return ids


@contextlib.contextmanager
def _refusing_panics() -> Iterator[None]:
    """Raise MalformedData where the Rust library fails, as for a regular expression that backtracks for ever."""
    try:
        yield
    except BaseException as err:
        if isinstance(err, TypeError) and "InputSequence" in str(err):  # a str that no bytes hold
            raise MalformedData("the text has a lone surrogate, which no tokenizer encodes") from None
        if not is_of_library(err):
            raise
        raise MalformedData(f"the model's tokenizer fails ({str(err)[:200]}); use another tokenizer or text") from None


read_json = partial(read_object, limit=64 * 1024**2, optional=True)


def special_tokens_of(config: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Return the texts of the special tokens by name; raises UnsupportedModel for one that is no text."""
    texts = {}
    for name in _SPECIAL_TOKENS:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if token and (not isinstance(text, str) or text.encode(errors="ignore").decode() != text):
            raise UnsupportedModel(
                f"{folder}/tokenizer_config.json: {name}: expected a text or {{content: text}}, got {ascii(token)[:80]}"
            )
        if token:
            texts[name] = text
    return texts


def template_text(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the text of a folder's chat template; None if it has none. Raises UnsupportedModel."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        if path.stat().st_size > 4 * MAX_TEMPLATE_CHARS:
            raise UnsupportedModel(f"{path}: {path.stat().st_size} bytes, too long for a chat template; replace it")
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as err:
            raise UnsupportedModel(f"{path}: not UTF-8 text (at byte {err.start}); restore the file") from None
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _template(
    folder: Path, config: Mapping[str, Any], arguments: Mapping[str, Any], *, needs_template: bool
) -> ChatTemplate | None:
    text = template_text(folder, config)
    if text is None and needs_template:
        raise UnsupportedModel(
            f"{folder}: no chat template; add chat_template.jinja, or use the folder of the instruction-tuned model; "
            'for prompts that are texts, data.text_prompts = "plain" needs no template'
        )
    if unread := [name for name in arguments if not re.search(rf"\b{re.escape(name)}\b", text or "")]:
        raise UnsupportedModel(
            f"data.template_arguments.{unread[0]} does nothing: {folder}'s chat template does not read it; remove it"
        )
    try:
        return None if text is None else ChatTemplate(text)
    except TemplateRefused as err:
        raise UnsupportedModel(f"{folder}: its chat template is refused: {err}; fix or replace it") from None


def _eos_ids(folder: Path, tokenizer: Tokenizer, eos_token: str | None, vocabulary: int | None) -> list[int]:
    token_ids: list[int] = []
    eos_id = tokenizer.token_to_id(eos_token) if eos_token else None
    if eos_id is not None:
        token_ids.append(eos_id)
    for name in ("generation_config.json", "config.json"):
        declared = read_json(folder / name).get("eos_token_id")
        if declared is not None:
            listed = declared if isinstance(declared, list) else [declared]
            if not all(type(token) is int and 0 <= token < _MAX_TOKEN_IDS for token in listed):
                raise UnsupportedModel(
                    f"{folder / name}: eos_token_id: expected a token id or a list of them, got {str(declared)[:80]}"
                )
            token_ids += listed
            break  # generation_config overrules config, as in transformers' generate
    if not token_ids:
        raise UnsupportedModel(
            f"{folder}: no end-of-sequence token in tokenizer_config.json, generation_config.json or config.json; "
            "a completion would never end; set eos_token_id in config.json"
        )
    if vocabulary is not None and min(token_ids) >= vocabulary:
        raise UnsupportedModel(
            f"{folder}: the end-of-sequence token ids {token_ids} are beyond the model's vocabulary of {vocabulary}: "
            "a completion would never end; use the tokenizer of this model"
        )
    return list(dict.fromkeys(token_ids))


def _vocabulary(folder: Path) -> int | None:
    """Return the number of token ids that the model has embeddings for; None if its configuration does not say."""
    config = read_json(folder / "config.json")
    text_config = config.get("text_config")
    size = config.get("vocab_size", text_config.get("vocab_size") if isinstance(text_config, dict) else None)
    if size is not None and (type(size) is not int or not 0 < size < _MAX_TOKEN_IDS):
        raise UnsupportedModel(
            f"{folder / 'config.json'}: vocab_size: expected a positive number, got {str(size)[:60]}"
        )
    return size


LENGTH_DEPENDENT = frozenset({"dynamic", "longrope", "su"})  # rotary embeddings; su is an older longrope


def model_context_tokens(folder: Path) -> int | None:
    """Return how many tokens a prompt and its completion may have; None if the configuration does not say.

    Where rotary embeddings depend on the length, those of the lengths that the model was trained with first.
    """
    config = read_json(folder / "config.json")
    text_config = config.get("text_config")
    parts = (config, text_config if isinstance(text_config, dict) else {})
    scaling = next((part[name] for part in parts for name in ("rope_parameters", "rope_scaling") if part.get(name)), {})
    names: tuple[str, ...] = ("max_position_embeddings", "n_positions")
    if isinstance(scaling, dict) and (scaling.get("rope_type") or scaling.get("type")) in LENGTH_DEPENDENT:
        parts, names = (scaling, *parts), ("original_max_position_embeddings", *names)
    size = next((part[name] for name in names for part in parts if name in part), None)
    return size if type(size) is int and size > 0 else None
