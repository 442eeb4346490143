"""CPU time of one step of an environment over HTTP, in the worker and in its server: ``python -m benchmarks.environment_steps``.

Plays episodes of ``guess_number`` with scripted answers, without a model: first one at a time, then many side by side.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

from penstock.protocol.config.environment_settings import EnvironmentDefinition
from penstock.rollout_service.environments.over_http.http_environment import HTTP, Http
from penstock.rollout_service.environments.play import Play, Row
from penstock.rollout_service.proxy.messages import Message

STEPS = 10
ROW = Row((Message("user", "go"),), None, {}, "")
SERVERS = {
    "penstock env serve": [
        sys.executable,
        "-P",
        "-m",
        "penstock.rollout_service.hosting",
        "serve",
        "guess_number",
        "--capacity",
        "1024",
    ],
    "examples/environment_node": ["node", "examples/environment_node/server.mjs", "0"],
}


def environment(url: str) -> Http:
    """Return the environment behind a URL."""
    own = HTTP.defined("bench", EnvironmentDefinition.model_validate({"type": "http", "options": {"url": url}}))
    own.connect()
    return own


async def episode(own: Http, seed: int) -> None:
    """Play one episode of `STEPS` steps."""
    play: Play = await own.start(f"bench.{seed}", 0, seed, ROW)
    for _ in range(STEPS):
        await play.step(Message("assistant", "no number"))  # pyright: ignore[reportGeneralTypeIssues]
    await play.close()  # pyright: ignore[reportGeneralTypeIssues]


async def measure(url: str, pid: int, episodes: int, at_once: int) -> str:
    """Return the CPU time of a step, start and end included in equal parts."""
    own, places = environment(url), asyncio.Semaphore(at_once)

    async def one(seed: int) -> None:
        async with places:
            await episode(own, seed)

    await one(0)
    before, served, wall = time.process_time(), cpu_s(pid), time.perf_counter()
    await asyncio.gather(*(one(seed) for seed in range(episodes)))
    calls = episodes * (STEPS + 2)
    worker, server = time.process_time() - before, cpu_s(pid) - served
    wall = time.perf_counter() - wall
    await own.close()
    return f"{at_once:>4} at once: worker {1000 * worker / calls:.2f} ms, server {1000 * server / calls:.2f} ms a call ({calls / wall:.0f} calls/s)"


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure both servers."""
    for name, command in SERVERS.items():
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            url = server.stdout.readline().rpartition(" at ")[2].split(". ")[0].strip()
            try:
                print(name)
                for episodes, at_once in ((100, 1), (400, 200)):
                    print("   ", asyncio.run(measure(url, server.pid, episodes, at_once)), flush=True)
            finally:
                server.terminate()


if __name__ == "__main__":
    main()
