"""Repeat the evaluations of a run on both engines, to see if the engine changes the accuracy of a version.

    make sglang-env
    python -m penstock.deploy.stored RUN_FOLDER/store -- python -m benchmarks.two_engines RUN VERSION [VERSION ...]

The run must still have these versions and have evaluated them (``trainer.keep_versions`` of more than its steps). Their
weights are exported, and the stored prompts of each evaluation are completed greedily by the embedded engine and by a
real SGLang on the CPU, in the packs of an evaluation. Prints a Markdown row for each version: the accuracy
recorded by the run, the accuracy with each engine now, and how many completions differ from the run's in any token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.sglang import engines
from benchmarks.token_versions import Versions, stored_groups

from penstock.deploy.bootstrap import ConnectionSettings
from penstock.protocol.config.run_file import load
from penstock.protocol.facts import Sampling
from penstock.protocol.trajectory import Group
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.engines.completion import Completion
from penstock.rollout_service.engines.managed_engine import ManagedEngine

PACK = 64  # prompts in one request, as in an evaluation


async def answers(engine: ManagedEngine, groups: Sequence[Group]) -> list[Completion]:
    """Complete the prompts of the groups greedily."""
    prompts = [group.trajectories[0].token_ids[: group.num_prompt_tokens].tolist() for group in groups]
    longest = max(group.trajectories[0].num_completion_tokens for group in groups)
    greedy = Sampling(max_new_tokens=longest, temperature=0.0)
    found: list[Completion] = []
    for first in range(0, len(prompts), PACK):
        replies = await engine.client.generate(prompts[first : first + PACK], greedy, 1)
        found += [reply[0] for reply in replies]
    return found


def accuracy(texts: Sequence[str], groups: Sequence[Group]) -> float:
    """Return the share of exact matches."""
    truths = [json.loads(group.reward.ground_truth or "null") for group in groups]
    return sum(text.strip() == truth for text, truth in zip(texts, truths, strict=True)) / len(groups)


def num_different(found: Sequence[Completion], groups: Sequence[Group]) -> int:
    """Return how many completions are not those of the run."""
    stored = [group.trajectories[0].token_ids[group.num_prompt_tokens :].tolist() for group in groups]
    return sum(one.token_ids != expected for one, expected in zip(found, stored, strict=True))


async def compare(blobs: Blobs, run_id: str, wanted: Sequence[int], scratch: Path) -> None:
    """Print the table of the wanted versions."""
    versions = Versions(blobs, run_id, scratch)
    evaluated = {
        version: [group for group in stored_groups(blobs, run_id, version) if group.split == "eval"]
        for version in wanted
    }
    found: dict[str, dict[int, list[Completion]]] = {}
    for name, engine in engines(scratch).items():
        found[name] = {}
        try:
            for version in wanted:
                await engine.load(versions.folder(version), PolicyVersion(version))
                found[name][version] = await answers(engine, evaluated[version])
        finally:
            await engine.stop()
    print("| version | prompts | the run | " + " | ".join(f"{name} | differ" for name in found) + " |")
    print("|---|---|---|" + "---|---|" * len(found))
    for version in wanted:
        groups = evaluated[version]
        cells = [accuracy([group.trajectories[0].completion_text for group in groups], groups)]
        for by_version in found.values():
            completions = by_version[version]
            cells += [accuracy([one.text for one in completions], groups), num_different(completions, groups)]
        print(f"| {version} | {len(groups)} | " + " | ".join(f"{cell:.3g}" for cell in cells) + " |", flush=True)


def main() -> None:
    """Compare the versions that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("version", type=int, nargs="+")
    options = parser.parse_args()
    blobs = Blobs(load(ConnectionSettings, overrides=[f"run.id={options.run}"], environ=os.environ).settings.s3)
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(compare(blobs, options.run, options.version, Path(scratch)))


if __name__ == "__main__":
    main()
