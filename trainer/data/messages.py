"""Reads the messages of a chat, in the ways that other projects write them, and the images of a row; pure.

An invalid value raises MalformedData that begins with its column. Images are in the parts of messages (transformers, OpenAI), or in the
column `images`: then parts ``{"type": "image"}`` (TRL), ``<image>`` in texts (verl), or nothing, before the first user message, stand for
them. An image is bytes, base64, a path below the folder of the data file, or the object with bytes and path of Hugging Face datasets.
`ImageRows` reads their bytes, decoded once within limits, and the tokens that stand for them in the prompt.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from penstock.protocol.errors import ImageRefused
from penstock.protocol.groups import RowImages
from penstock.protocol.images.admission import IMAGE_TYPES, AdmittedImage, Source, admit, image_bytes, take_images
from penstock.protocol.images.processor import ImageProcessor, expanded
from penstock.trainer.data.row_files import Row
from penstock.trainer.errors import MalformedData

if TYPE_CHECKING:
    from penstock.trainer.data.read_rows import PromptRow

Chat = tuple[dict[str, Any], ...]

ROLES = ("system", "developer", "user", "assistant", "tool")
_SAME_ROLES = {  # as ShareGPT, LLaMA-Factory, ms-swift and OpenAI's older interface write them
    "human": "user", "gpt": "assistant", "observation": "tool", "tool_response": "tool", "function": "tool",
    "function_response": "tool", "function-response": "tool", "tool_result": "tool", "ipython": "tool",
}  # fmt: skip
_LIKE_A_TOOL = re.compile("tool|function|observation|result")
_LIKE_AN_ASSISTANT = re.compile("(?:chat)?bot|model|ai|agent|(?:assistant_)?response|answer")
CALL_ROLES = ("function_call", "tool_call")  # the text is the JSON of a call, or of a list of them
_KNOWN_KEYS = frozenset({"role", "content", "from", "value", "name", "tool_calls", "tool_call_id", "function_call"})
_TRAINED_IF = (
    "weight", "loss", "loss_scale", "loss_weight", "loss_mask", "step_loss_mask", "train_on_turn", "train", "trainable",
    "is_trained", "label",
)  # fmt: skip
_TRAINED_UNLESS = ("mask", "masked", "is_masked", "ignore_loss")
_UNCLEAR = re.compile(r"(?:^|_)(?:loss|train\w*|mask\w*|weight|learn\w*|supervis\w+|ignored?|skip\w*|excluded?)(?:_|$)")
_RANGES = ("train_detail", "training_detail")  # axolotl's, parts of a text

PYTHON_CHAT = re.compile(r"""\s*\[?\s*\{\s*'(role|from|content|value)'\s*:""")

COLUMN = "images"
PLACEHOLDER = "<image>"


def read_chat(
    value: Any, column: str, *, roles: Mapping[str, str], text_role: str | None = None, reads_images: bool = False
) -> Chat:
    """Return the chat of a column: a list of messages, or a text that is one message of ``text_role``.

    ``roles`` are the roles beside `ROLES`, with the role that each stands for. Parts of images are refused unless it
    ``reads_images``; the content of a message with one is then a list of parts.
    """
    if isinstance(value, str) and text_role is not None:
        if not value.strip():
            refuse(column, "expected a text", "an empty one")
        return ({"role": text_role, "content": value},)
    if not isinstance(value, list) or not value:
        kinds = "a list of messages" if text_role is None else "a text or a list of messages"
        refuse(column, f"expected {kinds}", shown(value))
    chat: list[dict[str, Any]] = []
    for number, given in enumerate(value):
        message = _message(given, f"{column}[{number}]", roles, reads_images)
        if chat and chat[-1]["role"] == "assistant" and role_of(given, roles) in CALL_ROLES:
            if is_marked(message) != is_marked(chat[-1]):
                expected = "expected the mark of the message before it, which is the same answer"
                refuse(f"{column}[{number}]", expected, "another one; mark both as trained, or both as not trained")
            calls = [*chat[-1].get("tool_calls", []), *message["tool_calls"]]
            chat[-1] = {**message, **chat[-1], "tool_calls": calls}  # one answer, in messages of its own
        else:
            chat.append(message)
    return tuple(chat)


def role_of(message: Any, roles: Mapping[str, str]) -> Any:
    return _meant(message.get("role") or message.get("from"), roles) if isinstance(message, dict) else None


def is_answer(message: Any, roles: Mapping[str, str]) -> bool:
    """Return True for a message of a row, not yet read, that is what an assistant says or calls."""
    return role_of(message, roles) in ("assistant", *CALL_ROLES)


def has_text(answer: Mapping[str, Any]) -> bool:
    parts = ("tool_calls", "reasoning_content", "reasoning", "thinking")
    return bool(text_of(answer["content"]).strip()) or any(answer.get(name) for name in parts)


def is_blank(message: Mapping[str, Any]) -> bool:
    """Return True for a user's message without text and images."""
    content = message["content"]
    has_image = not isinstance(content, str) and any(part["type"] != "text" for part in content)
    return message["role"] == "user" and not has_image and not text_of(content).strip()


def _meant(role: Any, roles: Mapping[str, str]) -> Any:
    role = roles.get(role, role) if isinstance(role, str) else role
    if isinstance(role, str) and role not in roles.values() and role.lower() in (*ROLES, *_SAME_ROLES, *CALL_ROLES):
        role = role.lower()
    return _SAME_ROLES.get(role, role) if isinstance(role, str) and role not in roles.values() else role


def is_trained(message: Mapping[str, Any], column: str) -> bool:
    """Return False for an answer that its row marks as one not to imitate; raises MalformedData for a mark that is unclear."""
    if ranges := [name for name in _RANGES if message.get(name)]:
        refuse(f"{column}.{ranges[0]}", "expected whole messages to train", "parts of one; remove it, or set sft.mask")
    for name, value in message.items():
        is_known = name in (*_TRAINED_IF, *_TRAINED_UNLESS)
        if is_known and value is not None and truth(value) is None and name != "label":
            refuse(f"{column}.{name}", "expected true, false, 1 or 0", f"{shown(value)}; round or remove it")
        if not is_known and _UNCLEAR.search(name) and truth(value) is not None:
            refuse(f"{column}.{name}", "expected a mark such as loss or masked", f"{name!r}; rename or remove it")
    return not is_marked(message)


def is_marked(message: Mapping[str, Any]) -> bool:
    is_off = any(truth(message.get(name)) is False for name in _TRAINED_IF)
    return is_off or any(truth(message.get(name)) is True for name in _TRAINED_UNLESS)


def truth(value: Any) -> bool | None:
    """Return what true, false, 1, 0 or the text of one says; None for any other value."""
    if isinstance(value, str):
        texts = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}
        return texts.get(value.strip().lower())
    return bool(value) if isinstance(value, bool | int | float) and value in (0, 1) else None


def text_of(content: Any) -> str:
    return "".join(texts_of(content))


def texts_of(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if part["type"] == "text"]


def unread_keys(value: Any, *, obeys_marks: bool) -> set[str]:
    """Return the keys of a column's messages that only a chat template may read; SFT ``obeys_marks`` of answers, such as ``weight``."""
    messages = [message for message in value if isinstance(message, dict)] if isinstance(value, list) else []
    return {
        str(key)
        for message in messages
        for key, item in message.items()
        if item is not None
        and key not in _KNOWN_KEYS
        and not (obeys_marks and key in (*_TRAINED_IF, *_TRAINED_UNLESS) and is_answer(message, {}))
    }


def chat_in_text(value: Any, keys: tuple[str, ...] = ("role",)) -> Any:
    """Return the chat that a JSON text holds; any other text is returned as it is, even if it is JSON.

    Every message of a chat has one of ``keys``.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            return value
        if (
            isinstance(parsed, list)
            and parsed
            and all(isinstance(message, dict) and message.keys() & set(keys) for message in parsed)
        ):
            return parsed
    return value


def _message(message: Any, column: str, roles: Mapping[str, str], reads_images: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        refuse(column, "expected a message with role and content", shown(message))
    message = {name: value for name, value in message.items() if value is not None}
    if "role" not in message and "from" in message:  # as ShareGPT writes it
        role, content = message.pop("from"), message.pop("value", None)
        message, role_column, content_column = {**message, "content": content}, f"{column}.from", f"{column}.value"
    else:
        role, role_column, content_column = message.get("role"), f"{column}.role", f"{column}.content"
    if not isinstance(role, str) or not role:
        refuse(role_column, "expected a role such as user", shown(role))
    name, role = role, _meant(role, roles)
    if role in CALL_ROLES:
        calls = read_calls(message.get("content"), content_column)
        return {**message, "role": "assistant", "content": "", "tool_calls": calls}
    if role not in ROLES and role not in roles.values():
        is_assistant = _LIKE_AN_ASSISTANT.fullmatch(name.lower()) is not None
        meant = "tool" if _LIKE_A_TOOL.search(name.lower()) else "assistant" if is_assistant else "user"
        fix = f'{name!r}; say which one it is as data.roles.{name} = "{meant}"'
        refuse(role_column, f"expected one of the roles {', '.join(ROLES)}", fix)
    message = _with_calls(message, column)
    content = message.get("content", "" if "tool_calls" in message else None)
    if isinstance(content, list):
        parts = [_part(part, f"{content_column}[{n}]", reads_images) for n, part in enumerate(content)]
        has_images = any(part["type"] != "text" for part in parts)
        content = parts if has_images else "".join(part["text"] for part in parts)
    elif not isinstance(content, str):
        refuse(content_column, "expected a text", shown(content))
    return {**message, "role": role, "content": content}


def read_calls(value: Any, column: str) -> list[dict[str, Any]]:
    """Read calls that are objects ``{"name", "arguments"}``, or the JSON text of one or several of them."""
    parsed = json_of(value, object_pairs_hook=unique)
    calls = parsed if isinstance(parsed, list) else [parsed]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        refuse(column, 'expected a call such as {"name": "search", "arguments": {"query": "…"}}', shown(value))
    return [{"type": "function", "function": _function(call, f"{column}[{n}]")} for n, call in enumerate(calls)]


def _with_calls(message: dict[str, Any], column: str) -> dict[str, Any]:
    """Return a message whose calls are a list of objects, as OpenAI writes them now; an empty list is left out."""
    message = dict(message)
    if (earlier := message.pop("function_call", None)) and not message.get("tool_calls"):
        message["tool_calls"] = read_calls(earlier, f"{column}.function_call")
    calls = json_of(message.pop("tool_calls", None), object_pairs_hook=unique)
    if not calls:
        return message
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        refuse(f"{column}.tool_calls", "expected a list of calls", shown(calls))
    checked = []
    for number, call in enumerate(calls):
        at = f"{column}.tool_calls[{number}]"
        function = call.get("function")
        checked.append(
            {**call, "function": _function(function, f"{at}.function")}
            if isinstance(function, dict)
            else _function(call, at)
        )
    return {**message, "tool_calls": checked}


def _function(call: dict[str, Any], column: str) -> dict[str, Any]:
    if "arguments" not in call:  # Llama's key, or a call without any
        rest = {key: value for key, value in call.items() if key != "parameters"}
        call = {**rest, "arguments": call.get("parameters")}
    arguments = {} if call["arguments"] in (None, "") else call["arguments"]
    parsed = json_of(arguments, object_pairs_hook=unique) if str(arguments).strip() else {}
    try:
        json.dumps(parsed, allow_nan=False, default=str)
    except (TypeError, ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        expected = "expected an object, or its JSON text, without NaN, infinite numbers and keys that are there twice"
        refuse(f"{column}.arguments", expected, shown(call["arguments"]))
    return {**call, "arguments": arguments}


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of a JSON text, as `json.loads` asks for it; raises ValueError if it has a key twice."""
    if len(made := dict(pairs)) < len(pairs):
        raise ValueError("a key is there twice")
    return made


def json_of(value: Any, **options: Any) -> Any:
    """Return what a JSON text holds; any other value, and a text that is not valid JSON, as it is; ``options`` of `json.loads`."""
    try:
        return json.loads(value, **options) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _part(part: Any, column: str, reads_images: bool) -> dict[str, Any]:
    if not isinstance(part, dict):
        refuse(column, 'expected a part such as {"type": "text", "text": "…"}', shown(part))
    kind = part.get("type")
    if kind == "text":
        if not isinstance(text := part.get("text"), str):
            refuse(f"{column}.text", "expected a text", shown(text))
        return {"type": kind, "text": text}
    if kind in IMAGE_TYPES:
        if reads_images:
            return {key: value for key, value in part.items() if value is not None}  # Parquet fills parts up with nulls
        got = f"{kind!r}; images are read in the prompts of `penstock train` alone"
        refuse(column, "expected a part of type text", got)
    expected = "a part of type text or image" if reads_images else "a part of type text"
    return refuse(column, f"expected {expected}", shown(kind))


def shown(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, (str, int, float)):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    return "an empty list" if isinstance(value, Sequence) and not value else f"a {type(value).__name__}"


def refuse(column: str, expected: str, got: str) -> NoReturn:
    raise MalformedData(f"column {column}: {expected}, got {got}")


def images_of(row: Row) -> list[Source]:
    value = row.get(COLUMN)
    values = value if isinstance(value, list | tuple) else [value]
    return [] if value is None else list(values)


def with_images(chat: Chat, column_images: list[Source]) -> tuple[Chat, tuple[Source, ...]]:
    """Return a chat whose images are parts ``{"type": "image"}``, and their sources; ``column_images`` are those of the column.

    Raises MalformedData unless every image has one place, and every place an image.
    """
    if column_images:
        chat = tuple(_with_parts(message) for message in chat)
        at = next((number for number, message in enumerate(chat) if message["role"] == "user"), None)
        if at is not None and all(isinstance(message["content"], str) for message in chat):
            parts = [*[{"type": "image"}] * len(column_images), {"type": "text", "text": chat[at]["content"]}]
            chat = (*chat[:at], {**chat[at], "content": parts}, *chat[at + 1 :])
    remaining = iter(column_images)
    num_places = 0
    filled = []
    for message in chat:
        content = message["content"]
        if isinstance(content, list):
            content = [dict(part) for part in content]
            for part in content:
                if part["type"] in IMAGE_TYPES and part.keys() == {"type"}:
                    num_places += 1
                    if (source := next(remaining, None)) is not None:
                        part["image"] = source
        filled.append({**message, "content": content})
    if num_places != len(column_images):
        refuse(
            COLUMN,
            f"expected an image for each of {num_places} places ({PLACEHOLDER} in a text, or a part of type image without one)",
            f"{len(column_images)}",
        )
    try:
        bare, sources = take_images(filled)
    except ImageRefused as err:
        refuse(COLUMN, "expected images that can be read", str(err))
    return tuple(bare), tuple(sources)


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    split_parts: list[dict[str, Any]] = []
    for part in parts:
        if part["type"] != "text" or PLACEHOLDER not in part["text"]:
            split_parts.append(part)
            continue
        for number, text in enumerate(part["text"].split(PLACEHOLDER)):
            split_parts += [{"type": "image"}] * bool(number) + [{"type": "text", "text": text}] * bool(text)
    return {**message, "content": split_parts if split_parts != parts or isinstance(content, list) else content}


class ReadImages(NamedTuple):
    token_ids: list[int]  # with all tokens of the images
    places: RowImages | None = None
    files: tuple[AdmittedImage, ...] = ()  # each once
    sha256: bytes = b""  # of the images as the row gives them, in order; empty: it has none


@dataclass(frozen=True, slots=True)
class ImageRows:
    processor: ImageProcessor | None  # None: the model reads no images

    def read(self, row: PromptRow, token_ids: Sequence[int], folder: Path) -> ReadImages:
        """Return a prompt's ids with those of all images, where these are, and what they are.

        Raises MalformedData for an image that is refused, a text that holds the placeholder's, a model that reads no images.
        """
        if self.processor is None:
            if row.images:
                raise MalformedData(
                    f"column {COLUMN}: {len(row.images)} images, and model.path reads text alone; use a model that reads images, or "
                    f'set data.ignore = ["{COLUMN}"] where they are in a column of their own'
                )
            return ReadImages(list(token_ids))
        try:
            contents = [image_bytes(source, folder) for source in row.images]
            admitted = [admit(data) for data in contents]
            ids, images = expanded(token_ids, admitted, self.processor)
        except ImageRefused as err:
            raise MalformedData(f"column {COLUMN}: {err}") from None
        if not contents:
            return ReadImages(ids)
        digest = hashlib.sha256(b"".join(hashlib.sha256(data).digest() for data in contents)).digest()
        return ReadImages(ids, images, tuple({image.sha256: image for image in admitted}.values()), digest)
