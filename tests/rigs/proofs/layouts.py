"""Train the same batch in every layout of four ranks, and whole runs on ranks that share tokens and weights. `make proof NAME=layouts`.

    python -m tests.rigs.proofs.layouts [FOLDER]

Tiny models of three families, on one process and on four ranks that share rows, tokens and weights, at every ZeRO stage: losses to
2e-6, gradient norms to 5e-5 and weights to 1e-4, also one step after a checkpoint of four ranks that share rows. Then runs of the
quickstart's model, each replayed: the versions must be the same, hash for hash. Prints a line for each; exit code 1 when one does not hold.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from tests.rigs.proofs.proof import Proof, folder_of
from tests.small_run import write_small_run
from tests.trainer.learner.forks import Fork
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.deploy.quickstart_task import write_model

_DEADLINE_S = 600.0
_LOSS, _NORM, _WEIGHT = 2e-6, 5e-5, 1e-4
_LAYOUTS = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2))  # ranks that share tokens, and weights, of four
_OF_OTHERS = ((1, 2), (2, 2))
_RUNS = (
    "num_ranks=2 tensor_parallel=2 zero_stage=1",
    "num_ranks=2 tensor_parallel=2 zero_stage=3",
    "num_ranks=4 tensor_parallel=2 sequence_parallel=2 zero_stage=2",
)


class Layouts(Proof):
    """Trainings in layouts of ranks, compared with one process."""

    def compare(self, family: str, model: Path, layouts: tuple[tuple[int, int], ...]) -> None:
        """Train one model in some layouts of four ranks, and compare with one process."""
        alone = self._train(model, self.base / f"{family}-alone", (1, 1), num_ranks=1)["plain"]
        for sequence, tensor in layouts:
            folder = self.base / f"{family}-{sequence}-{tensor}"
            found = self._train(model, folder, (sequence, tensor), num_ranks=4)
            for stage in range(4):
                own = found[str(stage)]
                loss = max(abs(a - b) for a, b in zip(own["loss"], alone["loss"], strict=True))
                norm = max(abs(a / b - 1) for a, b in zip(own["norm"], alone["norm"], strict=True))
                weight = max(
                    abs(own[kind][name] / value - 1)
                    for kind in ("weights", "weights_from_plain")
                    for name, value in alone["weights"].items()
                    if value
                )
                what = (
                    f"{family}, {4 // sequence // tensor} x rows, {sequence} x tokens, {tensor} x weights, ZeRO {stage}"
                )
                self.check(
                    f"{what}: loss {loss:.1e}, norm {norm:.1e}, weights {weight:.1e}",
                    loss <= _LOSS and norm <= _NORM and weight <= _WEIGHT and own["resumed_equal"],
                )

    def _train(self, model: Path, folder: Path, layout: tuple[int, int], *, num_ranks: int) -> dict[str, Any]:
        folder.mkdir(parents=True)
        arguments = (str(model), str(folder), json.dumps(layout))
        started = Fork(folder, "tests.trainer.learner.layout_check", *arguments, num_ranks=num_ranks)
        try:
            return json.loads(started.wait(deadline_s=_DEADLINE_S).splitlines()[-1])
        finally:
            started.kill()

    def run(self, number: int, layout: str) -> None:
        run_id = f"layout{number}"
        write_small_run(self.base, run_id, trainer={"steps": 6, "checkpoint_every": 3})
        overrides = [f"trainer.{one}" for one in layout.split()]
        train = self._type("train", "--local", "run.toml", *overrides)
        self.check(f"a run on {layout}", train.returncode == 0)
        replay = self._type("replay", run_id, "run.toml", "--json")
        same = json.loads(replay.stdout.splitlines()[-1])["same"] if replay.returncode == 0 else replay.stderr[-300:]
        self.check(f"its replay: {same}", same == list(range(7)))

    def _type(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        done = self.ask(*arguments)
        if done.returncode:
            print(done.stdout[-1000:], done.stderr[-2000:], flush=True)
        return done


def random_model(family: str, folder: Path) -> Path:
    """Write a tiny model with random weights and a head of its own."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return folder


def main() -> int:
    base = folder_of("layouts")
    proof = Layouts(base, {**os.environ, "OMP_NUM_THREADS": "1"}, deadline_s=_DEADLINE_S)
    write_model(base / "model", seed=0)
    proof.compare("qwen3", base / "model", _LAYOUTS)
    for family in ("llama", "qwen2"):
        proof.compare(family, random_model(family, base / family), _OF_OTHERS)
    for number, layout in enumerate(_RUNS):
        proof.run(number, layout)
    return proof.end()


if __name__ == "__main__":
    sys.exit(main())
