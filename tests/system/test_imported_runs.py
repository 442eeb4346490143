"""Imported configurations of seven systems start by the command that the report prints, and their first step is the one worked out by hand."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import time
import tomllib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from penstock.deploy.quickstart_task import write_model
from penstock.protocol.config.run_file import load
from penstock.trainer.algorithm.credit import Scored, credit_rule
from penstock.trainer.algorithm.losses.tokens import Sequences, Tokens
from penstock.trainer.settings import TrainerSettings
from tests.small_run import PENSTOCK

pytestmark = pytest.mark.skipif(
    not os.environ.get("PENSTOCK_TEST_IMPORTS"), reason="a minute for each: make test-more NAME=imports"
)
CONFIGS: dict[str, dict[str, Any]] = tomllib.loads(
    (Path(__file__).parents[1] / "data" / "foreign_configs" / "first_steps.toml").read_text()
)
REWARDS = """
def even(completions, **columns):
    return [float(len(str(completion)) % 2 == 0) for completion in completions]


def reward_func(queries, prompts, labels, **rest):
    return [float(len(query) % 2 == 0) for query in queries]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, one with a longer context, and the same sums as the rows of each system."""
    folder = tmp_path_factory.mktemp("imports")
    for name in ("m", "big"):
        write_model(folder / name, seed=0)
    config = json.loads((folder / "big" / "config.json").read_text())
    (folder / "big" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1024}))
    sums = [(f"{n} + {n + 1}", str(2 * n + 1)) for n in range(8, 40)]
    rows: dict[str, list[dict[str, Any]]] = {
        "verl": [{"data_source": "math", "prompt": [{"role": "user", "content": a}], "reward_model": {"ground_truth": b}} for a, b in sums],
        "roll": [
            {"tag": "sums" if n % 3 else "ifeval", "messages": json.dumps([{"role": "user", "content": a}]), "ground_truth": b if n % 3 else '{"func_name": "validate_no_commas"}'}
            for n, (a, b) in enumerate(sums)
        ],
        "trl": [{"prompt": [{"role": "user", "content": a}], "ground_truth": b} for a, b in sums],
        "openrlhf": [{"input": a, "label": b} for a, b in sums],
        "slime": [{"prompt": a, "label": b} for a, b in sums],
        "pairs": [{"prompt": a, "chosen": b, "rejected": "0"} for a, b in sums],
        "starts": [{"prompt": str(n)} for n in range(16)],
    }  # fmt: skip
    for name, of_system in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_system))
    pq.write_table(pa.Table.from_pylist(rows["verl"]), folder / "verl.parquet")
    (folder / "rewards.py").write_text(REWARDS)
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_the_first_step_of_an_import_is_that_of_its_source(name: str, folder: Path) -> None:
    config, file, run_file = CONFIGS[name], folder / name, folder / f"{name}.toml"
    began = time.monotonic()
    file.write_text(config["text"].replace("DIR", str(folder)))
    said = subprocess.run([*PENSTOCK, "config", "import", str(file), "--to", str(run_file)], capture_output=True, text=True, check=False).stdout  # fmt: skip
    command = re.search(r"then: penstock (.*)", said)
    assert command is not None, said
    more = [*config["more"].replace("DIR", str(folder)).split(), f"run.dir={folder / 'runs'}"]
    run_id = re.sub(r"[^a-z]", "-", name)
    done = subprocess.run([*PENSTOCK, *shlex.split(command[1]), *more, f"run.id={run_id}"], capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    print(f"{name}: {time.monotonic() - began:.0f} s from the file to the end of the first step")
    if "prompts" not in config:
        assert (folder / "runs" / run_id / "dpo" / "model.safetensors").exists()
        return
    events = map(json.loads, (folder / "runs" / run_id / "metrics.jsonl").read_text().splitlines())
    step = next(event for event in events if event["kind"] == "step")
    assert (step["groups"]["trained"], step.get("updates", 1)) == (config["prompts"], config["steps"])
    settings = load(TrainerSettings, files=[run_file], overrides=more).settings
    algorithm = settings.algorithm
    assert (settings.rollout.group_size, algorithm.reward_kl_coefficient) == (config["samples"], config["reward_kl"])
    assert step.get("kl_coefficient", 0.0) == config["kl"] or config["reward_kl"]
    assert bounds(settings) == pytest.approx(config["clip"])
    if config["advantages"]:
        groups = [Scored([1, 0, 0, 0], [4] * 4, [False] * 4), Scored([1, 1, 0, 0], [4] * 4, [False] * 4)]
        found = credit_rule(algorithm, longest=16)(groups).advantages
        assert found == pytest.approx(config["advantages"], abs=1e-3)


def bounds(settings: TrainerSettings) -> list[float]:
    """Return the loss's bounds of the ratio: below and above, and of a bad token whose ratio is 99; 0 where there is none."""
    algorithm = settings.algorithm
    loss = algorithm.parts.loss.value
    ratios, credit = torch.tensor([0.01, 99.0, 99.0]), torch.tensor([-1.0, 1.0, -1.0])
    anchor = torch.full((3,), -9.0)
    tokens = Tokens(anchor + ratios.log(), anchor, anchor, credit, Sequences.of_lengths(torch.tensor([3])))
    low, high, dual = loss.fn(tokens, **algorithm.options_of(loss).model_dump()).loss.tolist()
    return [low, -high, dual if dual < 50 else 0.0]
