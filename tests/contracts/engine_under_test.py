"""One engine server and a small client for it, whichever implementation it is."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests import forked

DEADLINE_S = 300.0


@dataclass(frozen=True)
class EngineUnderTest:
    """A running server: its URL, its initial model, and its implementation."""

    kind: str  # "embedded" | "sglang"
    url: str
    model: Path

    def post(self, path: str, body: dict[str, Any] | None = None, *, expect: int = 200) -> Any:
        """Send a JSON body and return the JSON reply (or text), asserting the status."""
        reply = httpx.post(self.url + path, json=body or {}, timeout=DEADLINE_S)
        assert reply.status_code == expect, f"{path}: {reply.status_code} {reply.text}"
        return reply.json() if "json" in reply.headers.get("content-type", "") else reply.text

    def get(self, path: str, *, expect: int = 200) -> Any:
        """Return the JSON reply (or text) of a GET, asserting the status."""
        reply = httpx.get(self.url + path, timeout=DEADLINE_S)
        assert reply.status_code == expect, f"{path}: {reply.status_code} {reply.text}"
        return reply.json() if "json" in reply.headers.get("content-type", "") else reply.text

    def generate(self, input_ids: Any, *, expect: int = 200, **fields: Any) -> Any:
        """Request completions with their logprobs; other keyword arguments are sampling parameters."""
        top = {
            name: fields.pop(name)
            for name in ("rid", "logprob_start_len", "top_logprobs_num", "return_prompt_token_ids")
            if name in fields
        }
        body = {"input_ids": input_ids, "sampling_params": fields, "return_logprob": True, **top}
        return self.post("/generate", body, expect=expect)

    def update(self, folder: Path, version: str, *, expect: int = 200, **fields: Any) -> Any:
        body = {"model_path": str(folder), "weight_version": version, "load_format": "auto", **fields}
        return self.post("/update_weights_from_disk", body, expect=expect)

    @property
    def version(self) -> str:
        return self.get("/model_info")["weight_version"]

    @contextlib.contextmanager
    def streaming(
        self, input_ids: list[int], *, rid: str, lora_path: str | None = None, **params: Any
    ) -> Iterator[Stream]:
        """Start a long generation and wait until it has begun; the block acts while it runs."""
        body = {
            "input_ids": input_ids,
            "rid": rid,
            "sampling_params": {"ignore_eos": True, **params},
            "return_logprob": True,
            "stream": True,
            "lora_path": lora_path,
        }
        with httpx.stream("POST", self.url + "/generate", json=body, timeout=DEADLINE_S) as reply:
            assert reply.status_code == 200
            stream = Stream(_lines(reply.iter_bytes()))
            stream.wait_for_tokens(8)
            yield stream


class Stream:
    def __init__(self, lines: Iterator[str]) -> None:
        self._lines = lines

    def wait_for_tokens(self, num_tokens: int) -> None:
        """Read chunks until so many tokens have been generated."""
        chunk: dict[str, Any] = {}
        while len(chunk.get("output_ids", ())) < num_tokens:
            data = self._next()
            assert data is not None, f"the generation ended after {chunk}"
            chunk = _parse(data)

    def wait_for_version(self, version: str, *, more_tokens: int) -> None:
        chunk: dict[str, Any] = {"meta_info": {"weight_version": None}}
        while chunk["meta_info"]["weight_version"] != version:
            data = self._next()
            assert data is not None, f"the generation ended before version {version}"
            chunk = _parse(data)
        self.wait_for_tokens(len(chunk["output_ids"]) + more_tokens)

    def result(self) -> dict[str, Any]:
        """Read to the end and return the final reply; the cumulative chunks before it are not even parsed."""
        last = None
        while (data := self._next()) is not None:
            last = data
        assert last is not None, "the generation ended before this could read its last chunk"
        reply = _parse(last)
        assert reply["meta_info"]["finish_reason"] is not None, reply
        return reply

    def _next(self) -> str | None:
        for line in self._lines:
            if line == "data: [DONE]":
                return None
            if line.startswith("data: "):
                return line.removeprefix("data: ")
        return None


def _lines(chunks: Iterator[bytes]) -> Iterator[str]:
    """Yield the lines of an event stream, which end with LF; httpx would also cut a text at U+0085 or U+2028."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line.decode().removesuffix("\r") for line in whole)


def _parse(data: str) -> dict[str, Any]:
    chunk = json.loads(data)
    assert "error" not in chunk, chunk
    return chunk


def start_engine(model: Path, log: Path, *arguments: str) -> forked.Popen:
    engine = ["-m", "penstock.rollout_service.embedded_engine", "--model-path", str(model), "--port", "0"]
    command = [sys.executable, "-P", *engine, *arguments]
    with log.open("ab") as output:
        return forked.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


@contextlib.contextmanager
def embedded_engine(model: Path, scratch: Path, *arguments: str) -> Iterator[EngineUnderTest]:
    """Run an embedded engine on a model folder for the length of the block."""
    port_file = scratch / "port"
    log = scratch / "engine.log"
    process = start_engine(model, log, "--port-file", str(port_file), *arguments)
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not port_file.exists():
            assert process.poll() is None, f"the engine ended: {log.read_text()}"
            assert time.monotonic() < deadline, f"the engine opened no port: {log.read_text()}"
            time.sleep(0.02)
        yield EngineUnderTest("embedded", f"http://127.0.0.1:{port_file.read_text().strip()}", model)
        assert process.poll() is None, f"the engine exited: {log.read_text()}"
    finally:
        process.kill()
        process.wait()
