"""`penstock chat`: talk to what a run has trained."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.console import connections
from penstock.console.tools.chat_engine import ChatEngine, ChatRefused, Message
from penstock.console.tools.runs import list_folder
from penstock.protocol.errors import ConfigError
from penstock.protocol.subjects import check_run_id

_FORGET = "/new"
_ANSWER_TOKENS = 512


@dataclass(frozen=True, slots=True)
class How:
    """How to talk; see `penstock chat --help`."""

    model: str | None = None  # folder, instead of the run's own
    prompt: str | None = None  # one question, instead of a conversation
    keep: bool = False
    device: str = "cpu"
    temperature: float = 0.0
    max_tokens: int | None = None


def talk(run: str, arguments: Sequence[str], environ: Mapping[str, str], how: How) -> int:
    """Answer one prompt, or every line typed until Ctrl-D or Ctrl-C; returns the exit code.

    Each line is asked alone, as a single-turn run has trained it; ``how.keep`` keeps the conversation.
    Raises ConfigError when there is no such run or model, ChatEngineError when the engine fails.
    """
    check_run_id(run)
    folder = connections.find(arguments, environ).settings.run.dir / run
    model = find_model(folder, how.model)
    dtype, system = trained_with(folder)
    with ChatEngine(model, device=how.device, dtype=dtype) as engine:
        start: list[Message] = [{"role": "system", "content": system}] if system and engine.is_chat else []

        def ask(history: Sequence[Message], line: str) -> str:
            max_tokens = answer_length(model) if how.max_tokens is None else how.max_tokens
            question = {"role": "user", "content": line}
            return engine.answer([*history, question], temperature=how.temperature, max_tokens=max_tokens)

        if how.prompt is not None:
            print(ask(start, how.prompt))
            return 0
        _greet(run, is_chat=engine.is_chat, keep=how.keep)
        _converse(start, ask, keep=how.keep)
    return 0


def _converse(start: Sequence[Message], ask: Callable[[Sequence[Message], str], str], *, keep: bool) -> None:
    history = list(start)
    while (line := _read_line()) is not None:
        if line == _FORGET:
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
    """Return the model folder to talk to; raises ConfigError naming what is there instead."""
    if model is not None:
        return Path(model)
    if not folder.is_dir():
        others = ", ".join(line.run for line in list_folder(folder.parent)[:5]) or "none"
        raise ConfigError(f"no run {folder.name} in {folder.parent}/; there: {others}")
    if not (folder / "model").is_dir():
        raise ConfigError(
            f"run {folder.name} has no model yet ({folder / 'model'}); it is written when the run ends. "
            "To talk to another model: --model DIR"
        )
    return folder / "model"


def answer_length(model: Path) -> int:
    """Return how long an answer may be when nobody says: half of a small model's context, at most 512 tokens."""
    try:
        context = int(json.loads((model / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError):
        return _ANSWER_TOKENS
    return max(1, min(_ANSWER_TOKENS, context // 2))


def trained_with(folder: Path) -> tuple[str, str]:
    """Return the dtype and the system prompt of the run, from its config.json; defaults where it is silent."""
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))["settings"]
        return str(settings["model"]["dtype"]), str(settings["data"]["system_prompt"])
    except (OSError, ValueError, KeyError, TypeError):
        return "float32", ""


def _greet(run: str, *, is_chat: bool, keep: bool) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401, PLC0415 - arrow keys and history, where Python was built with it
    if not sys.stdin.isatty():
        return
    how = f"the conversation is kept, {_FORGET} forgets it" if keep else "each line is asked alone (--keep: kept)"
    kind = "" if is_chat else " It has no chat template: it continues your text."
    print(f"talking to {run}; {how}; Ctrl-D ends.{kind}", file=sys.stderr)


def _read_line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        if sys.stdin.isatty():
            print(file=sys.stderr)
        return None
