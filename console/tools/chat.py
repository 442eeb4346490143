"""`penstock chat`: a conversation with the model of a run."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.console import connections
from penstock.console.tools.chat_engine import ChatEngine, ChatRefused, Message
from penstock.console.tools.runs import unknown_run
from penstock.protocol.errors import ConfigError
from penstock.protocol.files import read_regular
from penstock.protocol.subjects import check_run_id

_CLEAR = "/new"
_ANSWER_TOKENS = 512


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options of a conversation; see `penstock chat --help`."""

    model: str | None = None  # folder of another model
    prompt: str | None = None  # a single prompt instead of a conversation
    keep: bool = False
    device: str = "cpu"
    temperature: float = 0.0
    max_tokens: int | None = None


def chat(run: str, arguments: Sequence[str], environ: Mapping[str, str], options: ChatOptions) -> int:
    """Answer one prompt, or every line typed until Ctrl-D or Ctrl-C; returns the exit code.

    Each line is sent alone, as in single-turn training; ``options.keep`` sends the whole conversation.
    Raises ConfigError when there is no such run or model, ChatEngineError when the engine fails.
    """
    check_run_id(run)
    folder = connections.find(arguments, environ).settings.run.dir / run
    model = find_model(folder, options.model)
    dtype, system = trained_with(folder)
    with ChatEngine(model, device=options.device, dtype=dtype) as engine:
        start: list[Message] = [{"role": "system", "content": system}] if system and engine.is_chat else []

        def ask(history: Sequence[Message], line: str) -> str:
            max_tokens = answer_length(model) if options.max_tokens is None else options.max_tokens
            question = {"role": "user", "content": line}
            return engine.answer([*history, question], temperature=options.temperature, max_tokens=max_tokens)

        if options.prompt is not None:
            print(ask(start, options.prompt))
            return 0
        _greet(run, is_chat=engine.is_chat, keep=options.keep)
        _converse(start, ask, keep=options.keep)
    return 0


def _converse(start: Sequence[Message], ask: Callable[[Sequence[Message], str], str], *, keep: bool) -> None:
    history = list(start)
    while (line := _read_line()) is not None:
        if line == _CLEAR:
            history = list(start)
        elif line:
            try:
                answer = ask(history, line)
            except ChatRefused as err:  # this line, not the conversation
                print(f"penstock: {err}", file=sys.stderr)
                continue
            print(answer, flush=True)
            if keep:
                history += [{"role": "user", "content": line}, {"role": "assistant", "content": answer}]


def find_model(folder: Path, model: str | None) -> Path:
    """Return the folder of the model to chat with; raises ConfigError that lists the runs found."""
    if model is not None:
        return Path(model)
    if not folder.is_dir():
        raise unknown_run(folder.name, folder.parent)
    if not (folder / "model").is_dir():
        raise ConfigError(
            f"run {folder.name} has no model yet ({folder / 'model'}); it is written when the run ends. "
            "To use another model: --model DIR"
        )
    return folder / "model"


def answer_length(model: Path) -> int:
    """Return the default maximum length of an answer: half of the model's context, at most 512 tokens."""
    try:
        context = int(json.loads((model / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError):
        return _ANSWER_TOKENS
    return max(1, min(_ANSWER_TOKENS, context // 2))


def trained_with(folder: Path) -> tuple[str, str]:
    """Return the dtype and the system prompt of the run, from its config.json; else the defaults."""
    try:
        settings = json.loads(read_regular(folder / "config.json"))["settings"]
        return str(settings["model"]["dtype"]), str(settings["data"]["system_prompt"])
    except (OSError, ValueError, KeyError, TypeError):
        return "float32", ""


def _greet(run: str, *, is_chat: bool, keep: bool) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401, PLC0415 - arrow keys and history, where Python was built with it
    if not sys.stdin.isatty():
        return
    how = (
        f"the whole conversation is sent, {_CLEAR} clears it"
        if keep
        else "each line is sent alone (--keep: the whole conversation)"
    )
    kind = "" if is_chat else " The model has no chat template: it continues your text."
    print(f"chat with {run}; {how}; Ctrl-D ends.{kind}", file=sys.stderr)


def _read_line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        if sys.stdin.isatty():
            print(file=sys.stderr)
        return None
