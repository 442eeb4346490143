"""Chat with the model of a run (`penstock chat`): an embedded engine as a child process, called over HTTP.

It is the engine of the rollout workers and has SGLang's HTTP interface. It exits when this process does, even by SIGKILL.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from penstock.console import launch
from penstock.console.connections import NamedRun
from penstock.console.report.event_fields import read_object, setting
from penstock.console.tools.runs import unknown_run
from penstock.protocol.errors import ConfigError, PenstockError
from penstock.protocol.files import json_value, read_regular
from penstock.protocol.model_folder import refuse_adapter
from penstock.protocol.process_end import error_text, printable

_START_S = 120.0  # a cold import of torch on a busy machine
_ANSWER_S = 600.0
_STOP_S = 5.0
_POLL_S = 0.05
_TAIL_CHARS = 2000
Message = dict[str, str]  # role, content
_CLEAR = "/new"
_ANSWER_TOKENS = 512


class ChatEngineError(PenstockError):
    """The engine did not start, exited, or refused a request."""


class ChatRefused(ChatEngineError):
    """The engine refused this conversation, for example because it is too long; others may be accepted."""


class ChatEngine:
    """One engine process; a context manager that is ready when entered and has ended when left."""

    def __init__(self, model: Path, *, device: str, dtype: str) -> None:
        if not (model / "config.json").is_file():
            raise ChatEngineError(f"{model} is not a model folder: it has no config.json; name one with --model DIR")
        self._model = model
        self._options = ("--device", device, "--dtype", dtype)
        self._has_template = has_chat_template(model)
        self._scratch = tempfile.TemporaryDirectory(prefix="penstock-chat-")
        self._process: subprocess.Popen[bytes] | None = None
        self._client: httpx.Client | None = None

    def __enter__(self) -> ChatEngine:
        folder = Path(self._scratch.name)
        self._log = folder / "engine.log"
        port_file = folder / "port"
        options = ["--port", "0", "--port-file", str(port_file), "--die-with-parent", *self._options]
        module = "penstock.rollout_service.embedded_engine"
        command = launch.module(module, "--model-path", str(self._model), *options)
        try:
            with self._log.open("wb") as output:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C must not reach the engine
                )
            port = self._wait_for_port(port_file)
            self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=_ANSWER_S, trust_env=False)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_chat(self) -> bool:
        """True if the model has a chat template; without one it only continues text."""
        return self._has_template

    def answer(self, messages: Sequence[Message], *, temperature: float, max_tokens: int) -> str:
        """Return the model's answer to a conversation, or its continuation of the last message.

        Raises ChatRefused when the engine refuses the conversation, ChatEngineError when the engine has exited.
        """
        if self._has_template:
            body: dict[str, Any] = {"model": "default", "messages": list(messages)}
            body |= {"temperature": temperature, "max_tokens": max_tokens}
            return str(self._post("/v1/chat/completions", body)["choices"][0]["message"]["content"])
        sampling = {"temperature": temperature, "max_new_tokens": max_tokens}
        return str(self._post("/generate", {"text": messages[-1]["content"], "sampling_params": sampling})["text"])

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._scratch.cleanup()

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert self._client is not None, "not entered"
        try:
            response = self._client.post(path, json=body)
        except httpx.HTTPError as err:
            raise ChatEngineError(f"the engine did not answer ({type(err).__name__}){self._tail()}") from None
        if response.status_code != httpx.codes.OK:
            raise ChatRefused(f"the engine refused: {_refusal(response)}")
        return response.json()

    def _wait_for_port(self, port_file: Path) -> int:
        assert self._process is not None
        give_up = time.monotonic() + _START_S
        while time.monotonic() < give_up:
            text = port_file.read_text().strip() if port_file.exists() else ""
            if text:
                return int(text)
            if self._process.poll() is not None:
                raise ChatEngineError(f"the engine ended with code {self._process.returncode}{self._tail()}")
            time.sleep(_POLL_S)
        raise ChatEngineError(f"the engine was not ready within {_START_S:.0f} s{self._tail()}")

    def _tail(self) -> str:
        text = self._log.read_text(encoding="utf-8", errors="replace").strip()
        return f"; the end of its log:\n{text[-_TAIL_CHARS:]}" if text else ""


def has_chat_template(model: Path) -> bool:
    if (model / "chat_template.jinja").is_file():
        return True
    try:
        return bool(json_value(read_regular(model / "tokenizer_config.json", follow=True)).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False


def _refusal(response: httpx.Response) -> str:
    try:
        error = response.json()["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}: {response.text[:500]}"


def chat(
    run: NamedRun,
    *,
    model: str | None,
    prompt: str | None,
    keep: bool,
    device: str,
    temperature: float,
    max_tokens: int | None,
) -> int:
    """Answer one prompt, or every line typed until Ctrl-D or Ctrl-C; returns the exit code.

    ``model`` is the folder of another model; with a ``prompt`` its answer is all. Each line is sent alone, as in
    single-turn training; ``keep`` sends the whole conversation.
    Raises ConfigError when there is no such run or model, ChatEngineError when the engine fails.
    """
    model_folder = find_model(run.folder, model)
    most_tokens = answer_length(model_folder) if max_tokens is None else max_tokens
    dtype, system = trained_with(run.folder)
    with ChatEngine(model_folder, device=device, dtype=dtype) as engine:
        start: list[Message] = [{"role": "system", "content": system}] if system and engine.is_chat else []

        def ask(history: Sequence[Message], line: str) -> str:
            question = {"role": "user", "content": line}
            return engine.answer([*history, question], temperature=temperature, max_tokens=most_tokens)

        if prompt is not None:
            print(_shown(ask(start, prompt)))
            return 0
        _greet(run.id, is_chat=engine.is_chat, keep=keep)
        _converse(start, ask, keep=keep)
    return 0


def _shown(answer: str) -> str:
    return printable(answer) if sys.stdout.isatty() else answer


def _converse(start: Sequence[Message], ask: Callable[[Sequence[Message], str], str], *, keep: bool) -> None:
    history = list(start)
    while (line := _read_line()) is not None:
        if line == _CLEAR:
            history = list(start)
        elif line:
            try:
                answer = ask(history, line)
            except ChatRefused as err:  # this line, not the conversation
                print(error_text(f"penstock: {err}"), file=sys.stderr)
                continue
            print(_shown(answer), flush=True)
            if keep:
                history += [{"role": "user", "content": line}, {"role": "assistant", "content": answer}]


def find_model(folder: Path, model: str | None) -> Path:
    """Return the folder of the model to chat with; raises ConfigError that lists the runs found."""
    if model is not None:
        refuse_adapter(Path(model), "--model")
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
        context = int(json_value(read_regular(model / "config.json", follow=True))["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return _ANSWER_TOKENS
    return max(1, min(_ANSWER_TOKENS, context // 2))


def trained_with(folder: Path) -> tuple[str, str]:
    """Return the dtype and the system prompt of the run, from its config.json; else the defaults."""
    config = read_object(folder / "config.json")
    return str(setting(config, "model", "dtype") or "float32"), str(setting(config, "data", "system_prompt") or "")


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
