"""Measure what agents cost: the proxy's CPU and latency for each request, and a step of an environment over HTTP.

    python -m benchmarks.agents                   # the proxy
    python -m benchmarks.agents --environments    # `penstock env serve`, and the server in Node of examples/

The proxy runs in a process of its own with an engine that answers 64 tokens at once (or after ``--engine-s``), so its CPU time is the
proxy's. The clients are a small asyncio client in this process. Environments: episodes of ``guess_number`` with scripted answers, without a
model, first one at a time, then many side by side; CPU in the worker and in the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.agents.proxy.agent_model import TEMPLATES, write_model

from penstock.agents.environments.over_http.http_environment import HTTP, Http
from penstock.agents.environments.play import Play, Row
from penstock.agents.proxy.answer_formats.answer_format import ANSWER_FORMATS
from penstock.agents.proxy.messages import Message
from penstock.agents.proxy.plan_prompt import PromptPlanner
from penstock.agents.proxy.renderer import ChatRenderer
from penstock.agents.proxy.server import serving
from penstock.agents.proxy.session import AgentModel, AgentProxy, EpisodeLimits, path
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.config.environment_settings import EnvironmentDefinition
from penstock.protocol.facts import Sampling
from penstock.protocol.versions import PolicyVersion, VersionRun
from penstock.rollout_service.engines.completion import Completion
from penstock.rollout_service.engines.engine_process import process_cpu_seconds

STEPS = 10
ROW = Row((Message("user", "go"),), None, {}, "")
SERVERS = {
    "penstock env serve": [
        sys.executable,
        "-P",
        "-m",
        "penstock.agents.hosting",
        "serve",
        "guess_number",
        "--capacity",
        "1024",
    ],
    "examples/environment_node": ["node", "examples/environment_node/server.mjs", "0"],
}


def environment(url: str) -> Http:
    own = HTTP.defined("bench", EnvironmentDefinition.model_validate({"type": "http", "options": {"url": url}}))
    own.connect()
    return own


async def episode(own: Http, seed: int) -> None:
    play: Play = await own.start(f"bench.{seed}", 0, seed, ROW)
    for _ in range(STEPS):
        await play.step(Message("assistant", "no number"))  # pyright: ignore[reportGeneralTypeIssues]
    await play.close()  # pyright: ignore[reportGeneralTypeIssues]


async def environment_calls(url: str, pid: int, episodes: int, at_once: int) -> str:
    """Return the CPU time of a step, start and end included in equal parts."""
    own, places = environment(url), asyncio.Semaphore(at_once)

    async def one(seed: int) -> None:
        async with places:
            await episode(own, seed)

    await one(0)
    before, served, wall = time.process_time(), process_cpu_seconds(pid), time.perf_counter()
    await asyncio.gather(*(one(seed) for seed in range(episodes)))
    calls = episodes * (STEPS + 2)
    worker, server = time.process_time() - before, process_cpu_seconds(pid) - served
    wall = time.perf_counter() - wall
    await own.close()
    return f"{at_once:>4} at once: worker {1000 * worker / calls:.2f} ms, server {1000 * server / calls:.2f} ms a call ({calls / wall:.0f} calls/s)"


def environments() -> None:
    """Measure both servers of environments."""
    for name, command in SERVERS.items():
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            url = server.stdout.readline().rpartition(" at ")[2].split(". ")[0].strip()
            try:
                print(name)
                for episodes, at_once in ((100, 1), (400, 200)):
                    print("   ", asyncio.run(environment_calls(url, server.pid, episodes, at_once)), flush=True)
            finally:
                server.terminate()


_ANSWER = 64
_GROUP = 8  # episodes that begin with the same prompt


@dataclass
class AnsweringEngine:
    """Answers the same 64 tokens after a time."""

    token_ids: list[int]
    seconds: float

    async def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, n: int) -> list[list[Completion]]:
        if self.seconds:
            await asyncio.sleep(self.seconds)
        ids = self.token_ids[-sampling.max_new_tokens :]
        runs = (VersionRun(PolicyVersion(1), 0, len(ids)),)
        return [[Completion(ids, [-0.5] * len(ids), runs, "stop", "")]]


async def serve(num_episodes: int, engine_s: float) -> None:
    """Serve episodes; print their URLs; end when the input is closed."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = ChatTokenizer.read(write_model(Path(folder), TEMPLATES["qwen25"]))
    words = tokenizer.encode("hello world the answer is 12 " * 20)[: _ANSWER - 1]
    engine = AnsweringEngine([*words, tokenizer.eos_ids[0]], engine_s)
    planner = PromptPlanner(ChatRenderer(tokenizer), frozenset(tokenizer.eos_ids), "keep")
    model = AgentModel(planner, ANSWER_FORMATS.find("hermes").value, None)
    proxy = AgentProxy(EpisodeLimits.model_validate({}))
    async with serving(proxy) as url:
        sampling = Sampling(max_new_tokens=_ANSWER)
        episodes = [proxy.begin(f"e{n}", model, engine, sampling) for n in range(num_episodes)]
        print(json.dumps({"url": url, "paths": [path(one) for one in episodes]}), flush=True)
        direct = time.process_time()
        for _ in range(200):
            await engine.generate([[1]], sampling, 1)
        print(json.dumps({"direct_cpu_ms": (time.process_time() - direct) * 5}), flush=True)
        await asyncio.to_thread(sys.stdin.read)


class Server:
    def __init__(self, num_episodes: int, engine_s: float = 0.0) -> None:
        command = [sys.executable, "-P", "-m", "benchmarks.agents", "--serve", str(num_episodes)]
        self._process = subprocess.Popen(
            [*command, "--engine-s", str(engine_s)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(Path.cwd())},
        )  # fmt: skip
        assert self._process.stdout is not None
        started = json.loads(self._process.stdout.readline())
        self.direct_cpu_ms: float = json.loads(self._process.stdout.readline())["direct_cpu_ms"]
        self.url, self.paths = started["url"], started["paths"]

    def cpu_s(self) -> float:
        return process_cpu_seconds(self._process.pid)

    def rss_mb(self) -> float:
        return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


class Client:
    def __init__(self, url: str) -> None:
        self._address = urlsplit(url)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, where: str, body: Any) -> Any:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._address.hostname, self._address.port, limit=2**24)
        reader, writer = self._streams
        data = json.dumps(body).encode()
        writer.write(f"POST {where} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        answer = json.loads(await reader.readexactly(length))
        assert head.startswith(b"HTTP/1.1 200"), answer
        return answer

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


async def conversation(server: Server, where: str, first: str, turns: int, tool_s: float = 0.0) -> list[float]:
    """Play one episode; return the seconds of each request."""
    client = Client(server.url)
    messages: list[Any] = [{"role": "user", "content": first}]
    times: list[float] = []
    for turn in range(turns):
        began = time.perf_counter()
        answer = await client.post(f"{where}/chat/completions", {"model": "policy", "messages": messages})
        times.append(time.perf_counter() - began)
        messages += [answer["choices"][0]["message"], {"role": "user", "content": f"result {turn}: the answer is 12"}]
        if tool_s:
            await asyncio.sleep(tool_s)
    client.close()
    return times


async def sequential(words: int, requests: int) -> dict[str, float]:
    """One request at a time: episodes of 8 turns whose first prompt has so many words, the same in a group."""
    server = Server(requests // 8 + 2)
    try:
        await conversation(server, server.paths[-1], "hello", 8)  # the first request imports what is imported late
        before = server.cpu_s()
        times: list[float] = []
        for number, where in enumerate(server.paths[: requests // 8]):
            times += await conversation(server, where, f"group {number // _GROUP} " + "hello " * words, 8)
        cpu = (server.cpu_s() - before) / len(times) * 1000
        return {
            "first_prompt_words": words,
            "requests": len(times),
            "cpu_ms": round(cpu, 2),
            "latency_ms": round(statistics.median(times) * 1000, 2),
            "direct_cpu_ms": round(server.direct_cpu_ms, 4),
        }
    finally:
        server.stop()


async def concurrent(episodes: int, turns: int, engine_s: float, tool_s: float) -> dict[str, float]:
    server = Server(episodes, engine_s)
    try:
        before, began = server.cpu_s(), time.monotonic()
        played = await asyncio.gather(
            *[
                conversation(server, where, f"hello {n // _GROUP} " * 100, turns, tool_s * (0.5 + n % 100 / 100))
                for n, where in enumerate(server.paths)
            ]
        )
        wall = time.monotonic() - began
        times = sorted(one for each in played for one in each)
        return {
            "episodes": episodes,
            "requests": len(times),
            "wall_s": round(wall, 1),
            "requests_per_s": round(len(times) / wall, 1),
            "cpu_ms": round((server.cpu_s() - before) / len(times) * 1000, 2),
            "latency_ms_p50": round(times[len(times) // 2] * 1000, 1),
            "latency_ms_p99": round(times[len(times) * 99 // 100] * 1000, 1),
            "engine_ms": engine_s * 1000,
            "rss_mb": round(server.rss_mb(), 1),
        }
    finally:
        server.stop()


async def measure(given: argparse.Namespace) -> None:
    for words in (200, 2_000, 20_000):
        print(json.dumps(await sequential(words, given.requests)), flush=True)
    print(json.dumps(await concurrent(given.episodes, 4, 0.5, 2.0)), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--serve", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--engine-s", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--environments", action="store_true", help="measure steps of environments instead")
    given = parser.parse_args()
    if given.environments:
        environments()
        return 0
    asyncio.run(serve(given.serve, given.engine_s) if given.serve else measure(given))
    return 0


if __name__ == "__main__":
    sys.exit(main())
