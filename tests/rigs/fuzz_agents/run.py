"""Play random agents against the proxy and check every trained token.

    python -m tests.rigs.fuzz_agents.run --requests 100000

Random weights, random agents, every template of the tests, all settings of the thinking; without sockets, so that most
of the time goes into requests. Exits with 1 when anything is wrong. ``--plant prompt`` and ``--plant row`` render a
history again on purpose: they must be found.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tests.rigs.fuzz_agents.agent import RandomAgent
from tests.rigs.fuzz_agents.model import (
    EmbeddedEngine,
    Findings,
    FunctionEngine,
    Recorded,
    RecordingSampler,
    check_episode,
    scores_aside,
    write_fuzz_model,
)
from tests.rigs.fuzz_agents.wire import PATHS

from penstock.agents.environments.program import outcome
from penstock.agents.environments.program_process import Ended
from penstock.agents.proxy.answer_formats.answer_format import ANSWER_FORMATS
from penstock.agents.proxy.calls import Spent
from penstock.agents.proxy.plan_prompt import PromptPlan, PromptPlanner
from penstock.agents.proxy.renderer import ChatRenderer
from penstock.agents.proxy.rows import TreeRows
from penstock.agents.proxy.server import ProxyApp
from penstock.agents.proxy.session import AgentModel, AgentProxy, EpisodeLimits, EpisodeSession
from penstock.protocol import chat_template
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.groups import Sampling

TEMPLATES = ("qwen25", "qwen3", "opens_think", "rewrites", "glm", "smollm2", "llama")
_THINKING = ("keep", "tool_cycle", "strip")
_LIMITS = ("context_length_exceeded", "max_turns", "max_stored_tokens")
FORMATS = tuple(sorted(ANSWER_FORMATS.built_in.keys() - {"hermes"}))  # hermes is half of all
_TOGETHER = 48


class Fuzzer:
    def __init__(
        self, folder: Path, *, engine: str, seed: int, plant: str = "", templates: tuple[str, ...] = TEMPLATES
    ) -> None:
        """Build the models below ``folder``; ``engine`` is "embedded" or "function"."""
        self.findings = Findings()
        self.counts: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._plant = plant
        # else each episode starts a process again
        chat_template._NUM_KEPT = max(chat_template._NUM_KEPT, len(templates))
        self._tokenizers = {name: write_fuzz_model(folder / name, name) for name in templates}
        self._renderers = {name: ChatRenderer(one) for name, one in self._tokenizers.items()}
        self._folder = folder
        self._engine: Any = EmbeddedEngine(folder, seed) if engine == "embedded" else None
        self._seed = seed

    async def run(self, num_requests: int) -> None:
        """Play episodes of about 25 requests, a few at once, until the requests are used up."""
        left = num_requests
        running: set[asyncio.Task[None]] = set()
        number = 0
        while left > 0 or running:
            while left > 0 and len(running) < _TOGETHER:
                count = min(left, self._random.randrange(1, 50))
                left -= count
                running.add(asyncio.create_task(self._episode(number, count)))
                number += 1
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()

    def engine_figures(self) -> dict[str, int]:
        """Return the embedded engine's counts of prompt tokens."""
        return {} if self._engine is None else self._engine.figures()

    def stop(self) -> None:
        if self._engine is not None:
            self._engine.stop()

    async def _episode(self, number: int, num_requests: int) -> None:
        draw = self._random
        template = draw.choice(list(self._tokenizers))
        tokenizer = self._tokenizers[template]
        planner_type = RenderingPlanner if self._plant == "prompt" else PromptPlanner
        planner = planner_type(self._renderers[template], frozenset(tokenizer.eos_ids), draw.choice(_THINKING))
        form = "llama" if template == "llama" else draw.choice(("hermes", draw.choice(FORMATS)))
        model = AgentModel(planner, ANSWER_FORMATS.find(form).value, draw.choice((300, 2048, 2048)))
        most = draw.choice((num_requests // 2 + 1, 1000, 1000))
        proxy = AgentProxy(EpisodeLimits(max_turns=most, retry_grace_s=0.0005))
        engine = self._engine or FunctionEngine(tokenizer, self._seed + number)
        recorded = Recorded()
        sampler, sampling = RecordingSampler(engine, recorded), Sampling(max_new_tokens=24)
        episode = proxy.begin(f"{number}-{template}", model, sampler, sampling)
        agent_seed = self._seed * 1_000_003 + number
        agent = RandomAgent(ProxyApp(proxy), episode, agent_seed, num_requests, draw.choice([*PATHS]))
        await agent.run()
        refused = await agent.last()
        made = proxy.end(episode)
        await agent.late()
        await asyncio.sleep(0)
        if self._plant == "row":
            made = rendered_rows(made, tokenizer)
        check_episode(episode, made, recorded, engine, self.findings)
        failures = [*agent.failures, *["the answer of a side request is scored"] * scores_aside(episode, made)]
        failures += self._wrong_rewards(episode, made, refused)
        self.findings.problems += [f"episode {episode.id}: {failure}" for failure in failures]
        for name, count in {**episode.counts, **agent.counts}.items():
            self.counts[name] += count
        self.counts.update(["episodes", f"format.{form}", f"last.{refused or 'answered'}"])
        self.counts["turns"] += len(episode.tree.turns)
        for cause, count in made.orphaned_turns.items():
            self.counts[f"orphaned_turns.{cause}"] += count

    def _wrong_rewards(self, episode: EpisodeSession, made: TreeRows, refused: str) -> list[str]:
        """Let the program end in every way after its last request; return which rewards are against the rule."""
        last = max((span.turn for row in made.rows for span in row.spans), default=None)
        wrong = []
        for status in (0, 1, 137, -9):
            played = outcome(
                Ended(status, ""),
                b'{"reward": 1}',
                episode,
                last_turn=last,
                needs_result=True,
                spent=Spent(),
                total_s=1.0,
            )
            due = last is not None and (status == 0 or (status == 1 and refused in _LIMITS))
            if bool(played.rewards) != due:
                wrong.append(f"reward {played.rewards} after {refused or 'an answer'} and exit status {status}")
        return wrong


class RenderingPlanner(PromptPlanner):
    """A planted error: now and then the history is decoded and tokenised again."""

    def plan(self, *given: Any) -> PromptPlan:
        """Return the plan with a prompt whose recorded part may have other tokens of the same text."""
        plan = super().plan(*given)
        tokenizer = self.renderer.tokenizer
        again = tokenizer.encode(tokenizer.decode(plan.prompt_ids.tolist()))
        return replace(plan, prompt_ids=np.asarray(again, dtype=np.int32))


def rendered_rows(made: TreeRows, tokenizer: ChatTokenizer) -> TreeRows:
    """Return rows in which the text of each answer is tokenised again: a planted error."""
    rows = []
    for row in made.rows:
        ids = row.trajectory.token_ids.copy()
        for span in row.spans:
            again = tokenizer.encode(tokenizer.decode(ids[span.start : span.end].tolist()))[: span.end - span.start]
            ids[span.start : span.start + len(again)] = again
        rows.append(replace(row, trajectory=replace(row.trajectory, token_ids=ids)))
    return replace(made, rows=tuple(rows))


def main() -> int:
    """Run the fuzzer; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=("embedded", "function"), default="embedded")
    parser.add_argument("--plant", choices=("prompt", "row"), default="")
    given = parser.parse_args()
    began, cpu = time.monotonic(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer(Path(folder), engine=given.engine, seed=given.seed, plant=given.plant)
        try:
            asyncio.run(fuzzer.run(given.requests))
        finally:
            fuzzer.stop()
    found = fuzzer.findings
    for problem in found.problems[:20]:
        print(problem)
    report = {
        "requests": given.requests,
        "engine": given.engine,
        "seed": given.seed,
        "problems": len(found.problems),
        "rows": found.rows,
        "trained_tokens": found.trained_tokens,
        "worst_logprob_difference": found.worst_logprob,
        "wall_s": round(time.monotonic() - began, 1),
        "cpu_s": round(time.process_time() - cpu, 1),
        "engine_tokens": fuzzer.engine_figures(),
        "counts": dict(sorted(fuzzer.counts.items())),
    }
    print(json.dumps(report, indent=2))
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
