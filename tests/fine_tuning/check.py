"""Trains on given answers in many ways in one process (or on two ranks), and prints what each way gave.

Arguments: FOLDER (model/, turns.jsonl, pairs.jsonl), then names of `CASES`.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.numpy import load_file
from structlog.testing import capture_logs
from tests.fine_tuning.trl_rows import BATCH, NUM_STEPS

from penstock.fine_tuning import dpo, loop, rm, sft
from penstock.trainer import crash_points
from penstock.trainer.errors import ExportFailed
from penstock.trainer.learner import adapter
from penstock.trainer.learner.export import ModelFiles
from penstock.trainer.ranks import Ranks
from penstock.trainer.settings import TrainerSettings

ADAMW = {"batch_size": BATCH, "betas": [0.9, 0.999], "schedule": "linear"}
SFT_LR, DPO_LR = 1e-3, 3e-4
LONG_STEPS = 120
WITH_DROPOUT: dict[str, Any] = {"model": {"lora": {"rank": 4, "dropout": 0.2}}, "data": {"shuffle": True}}
LORA: dict[str, Any] = {"model": {"lora": {"rank": 4}}}
WHOLE = ("sft", "dpo/sigmoid", "dpo/ipo", "rm")

Way = tuple[str, str, dict[str, Any], dict[str, Any]]  # a name, the command, its section and other sections


class StopAfter(threading.Event):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self._left = steps

    def is_set(self) -> bool:
        self._left -= 1
        return self._left <= 0


def settings(folder: Path, case: str, section: str, own: dict[str, Any], **other: Any) -> TrainerSettings:
    """Return the settings of TRL's recorded runs, changed by the case."""
    rows = "turns.jsonl" if section == "sft" else "pairs.jsonl"
    given = {
        "run": {"id": case, "dir": folder / "runs"},
        "model": {"path": folder / "model", **other.get("model", {})},
        "data": {"shuffle": False, **other.get("data", {})},
        "rollout": {"max_new_tokens": 64},
        "trainer": {"min_lr_ratio": 1 / NUM_STEPS, "micro_batch_tokens": 256, **other.get("trainer", {})},
        section: {"data": folder / rows, "steps": NUM_STEPS, **ADAMW, **own},
    }
    given["data"]["max_prompt_tokens"] = 64
    return TrainerSettings.model_validate(given)


def train(ranks: Ranks, section: str, chosen: TrainerSettings, stop: int | None = None) -> dict[str, Any]:
    """Train, and return the lines of metrics.jsonl, a digest of the weights and what is on disk."""
    event = threading.Event() if stop is None else StopAfter(stop)
    task = {"sft": sft, "dpo": dpo, "rm": rm}[section]
    result = loop.train(chosen, ranks, event, section, task.open_rows, task.open_task)
    if not ranks.is_leader:
        return {}
    folder = chosen.run.folder / f"{section}-training"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "steps": [line for line in lines if line["kind"] == "step"],
        "evals": [line for line in lines if line["kind"] == "eval"],
        "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_dir()),
        "weights": None if result is None else digest(result.folder / "model.safetensors"),
        "weights_of_step": None if result is None else result.weights_of_step,
        "checksum": None if result is None else checksum(result.folder / "model.safetensors"),
    }


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def checksum(path: Path) -> float:
    return float(sum(abs(tensor.astype("float64")).sum() for tensor in load_file(path).values()))


def curve(folder: Path, ranks: Ranks, name: str) -> dict[str, Any]:
    """Train as a recorded curve of TRL was made; all but four of them for 5 of the 50 steps."""
    kind, _, loss = name.partition("/")
    smoothing = {"robust": {"label_smoothing": 0.1}, "exo_pair": {"label_smoothing": 1e-3}}.get(loss, {})
    labelled = {"data": folder / "labelled.jsonl", "eval_data": folder / "held_out_labelled.jsonl", "eval_every": 5}
    section, own = {
        "dpo": ("dpo", {"loss": loss, **smoothing}),
        "kto": ("dpo", {"loss": "kto", **labelled}),
        "wpo": ("dpo", {"weighting": "wpo"}),
        "rm": ("rm", {"center": 0.01, "eval_data": folder / "held_out_pairs.jsonl"}),
        "sft": ("sft", {"loss": "nll"}),
        "dft": ("sft", {"loss": "dft"}),
    }[kind]
    own = {"lr": SFT_LR if section == "sft" else DPO_LR, **own}
    chosen = settings(folder, f"trl-{(loss or kind).replace('_', '-')}", section, own)
    return train(ranks, section, chosen, stop=None if name in WHOLE else 5)


def validated(folder: Path, **own: Any) -> dict[str, Any]:
    """Return a section that keeps the weights of the lowest validation loss."""
    return {"lr": SFT_LR, "eval_data": folder / "held_out.jsonl", "keep_best": True, **own}


def resumed(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Train without interruption, and with two: after a checkpoint at step 3, and at step 5 after one more."""
    own = validated(folder, steps=8, eval_every=2)
    whole = train(ranks, "sft", settings(folder, "whole", "sft", own, **WITH_DROPOUT))
    parted = settings(folder, "parted", "sft", own, **WITH_DROPOUT)
    first = train(ranks, "sft", parted, stop=3)
    second = train(ranks, "sft", parted, stop=2)
    last = train(ranks, "sft", parted)
    return {"whole": whole, "first": first, "second": second, "last": last}


def killed(folder: Path, ranks: Ranks, point: str) -> dict[str, Any]:
    """Train as the uninterrupted run of `resumed`, with a checkpoint after each step; SIGKILL in one ends it."""
    own = validated(folder, steps=8, eval_every=2, checkpoint_every=1)
    crash_points.arm(point)
    return train(ranks, "sft", settings(folder, "killed", "sft", own, **WITH_DROPOUT))


def long(folder: Path, ranks: Ranks, name: str) -> dict[str, Any]:
    """Train for many steps, with a checkpoint after each: to be killed at random moments."""
    own = validated(folder, steps=LONG_STEPS, eval_every=20, checkpoint_every=1)
    chosen = settings(folder, name, "sft", own, trainer={"zero_stage": 2}, data={"shuffle": True})
    return train(ranks, "sft", chosen)


def lora_rm(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Train a reward model by adapters, in one go and in two; return what peft, transformers and the server score."""
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    from penstock.reward_model.commands import ModelOptions
    from penstock.reward_model.served_model import Classifier

    own = {"lr": 3e-3, "steps": 6, "eval_data": folder / "held_out_pairs.jsonl"}
    other: dict[str, Any] = {"model": {"lora": {"rank": 4, "dropout": 0.1}, "gradient_checkpointing": True}}
    whole = train(ranks, "rm", settings(folder, "lora-rm", "rm", own, **other))
    parted = settings(folder, "lora-rm-parted", "rm", own, **other)
    train(ranks, "rm", parted, stop=3)
    last = train(ranks, "rm", parted)
    home = folder / "runs" / "lora-rm"
    base, merged = (
        AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32)
        for path in (folder / "model", home / "rm")
    )
    adapted = PeftModel.from_pretrained(base, home / "rm-adapter").eval()
    texts = ["2+3=", "7+7=14", "9+1=0"]
    served = Classifier(home / "rm", ModelOptions(dtype="float32", device="cpu", batch_tokens=64))
    ids = [served._tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
    with torch.no_grad():
        scores = [[float(model(input_ids=one).logits) for one in ids] for model in (adapted, merged.eval())]
    scores.append([float(one.score or 0.0) for one in served.score(texts, special_tokens=True)])
    return {"whole": whole, "last": last, "scores": scores}


def broken_export(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Train twice; the second time one matrix of the result is written as zeros."""
    chosen = settings(folder, "broken", "sft", {"lr": SFT_LR, "steps": 1})
    before, put, text = train(ranks, "sft", chosen), ModelFiles.put, ""

    def put_wrong(self: ModelFiles, name: str, tensor: torch.Tensor) -> None:
        put(self, name, tensor * 0 if name.endswith("layers.0.mlp.down_proj.weight") else tensor)

    ModelFiles.put = put_wrong
    try:
        train(ranks, "sft", chosen)
    except ExportFailed as err:
        text = str(err)
    finally:
        ModelFiles.put = put
    after = digest(chosen.run.folder / "sft" / "model.safetensors")
    return {"text": text, "before": before["weights"], "after": after}


def merged(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Train adapters in bfloat16 three times: with a small rate, a large one, and a result without them."""
    other = {"model": {"lora": {"rank": 4}, "dtype": "bfloat16"}, "trainer": {"zero_stage": 1}}
    found: dict[str, Any] = {}
    for name, lr in (("small", 1e-5), ("large", 1e-2)):
        with capture_logs() as logs:
            one = settings(folder, f"merged-{name}", "sft", {"lr": lr, "steps": 4}, **other)
            loop.train(one, ranks, threading.Event(), "sft", sft.open_rows, sft.open_task)
        found[name] = {key: line[key] for line in logs if "folder" in line for key in line}
    chosen, merge = settings(folder, "merged-lost", "sft", {"lr": 5e-4, "steps": 4}, **other), adapter.merged
    adapter.merged = lambda weight, *_, **_named: weight
    try:
        loop.train(chosen, ranks, threading.Event(), "sft", sft.open_rows, sft.open_task)
        found["lost"] = ""
    except ExportFailed as err:
        found["lost"] = str(err)
    finally:
        adapter.merged = merge
    return found


def early(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Train with a rate at which the validation loss rises, two validations longer than it falls."""
    own = validated(folder, lr=0.5, epochs=1.0, eval_every=1, early_stop=2, schedule="constant")
    return train(ranks, "sft", settings(folder, "early", "sft", own))


def layouts(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Train in the ways whose losses need the whole batch, at each ZeRO stage."""
    pairs, turns = ({"eval_data": folder / f"held_out{kind}.jsonl"} for kind in ("_pairs", ""))
    shared = {"num_ranks": ranks.num_ranks, "sequence_parallel": ranks.num_ranks}
    ways: list[Way] = [
        ("sft-0", "sft", turns, {"trainer": {"zero_stage": 0}}),
        ("sft-3", "sft", {}, {"trainer": {"zero_stage": 3}}),
        ("lora-2", "sft", {}, {"trainer": {"zero_stage": 2}, **LORA}),
        ("aot-1", "dpo", {"loss": "aot", **pairs}, {}),
        ("kto-2", "dpo", {"loss": "kto"}, {"trainer": {"zero_stage": 2}}),
        ("orpo-1", "dpo", {"loss": "orpo"}, {}),
        ("lora-dpo-3", "dpo", {}, {"trainer": {"zero_stage": 3}, **LORA}),
        ("live-1", "dpo", {"reference": "live"}, {}),
        ("rm-3", "rm", {}, {"trainer": {"zero_stage": 3}}),
        ("wpo-shared-tokens", "dpo", {"weighting": "wpo"}, {"trainer": shared}),
        ("rm-shared-tokens", "rm", {}, {"trainer": shared}),
        ("sft-shared-tokens-0", "sft", turns, {"trainer": {**shared, "zero_stage": 0}}),
        ("lora-sft-shared-tokens-3", "sft", {}, {"trainer": {**shared, "zero_stage": 3}, **LORA}),
        ("aot-shared-tokens-2", "dpo", {"loss": "aot"}, {"trainer": {**shared, "zero_stage": 2}}),
        ("lora-rm-3", "rm", {}, {"trainer": {"zero_stage": 3}, **LORA}),
        ("lora-rm-0", "rm", {}, {"trainer": {"zero_stage": 0}, **LORA}),
        ("precomputed-1", "dpo", {"reference": "precomputed"}, {}),
    ]
    return trained_in(ways, folder, ranks)


def trained_in(ways: list[Way], folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Make three steps in each way."""
    found = {}
    for name, section, own, other in ways:
        own = {"lr": SFT_LR if section == "sft" else DPO_LR, "steps": 3, **own}
        chosen = settings(folder, f"{name}-on-{ranks.num_ranks}", section, own, **other)
        found[name] = train(ranks, section, chosen)
    return found


def divided(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Train with weights that two ranks share, at each ZeRO stage; last: DeepSpeed keeps the groups of such ranks.

    One rank continues what two began.
    """
    shared = {"num_ranks": ranks.num_ranks, "tensor_parallel": ranks.num_ranks}
    pairs, turns = ({"eval_data": folder / f"held_out{kind}.jsonl"} for kind in ("_pairs", ""))
    ways: list[tuple[str, str, dict[str, Any], int]] = [
        ("sft-0", "sft", turns, 0),
        ("sft-3", "sft", {}, 3),
        ("live-1", "dpo", {"reference": "live", **pairs}, 1),
        ("aot-2", "dpo", {"loss": "aot"}, 2),
        ("rm-1", "rm", pairs, 1),
        ("rm-3", "rm", {}, 3),
    ]
    named: list[Way] = [
        (f"{name}-shared-weights", section, own, {"trainer": {**shared, "zero_stage": stage}})
        for name, section, own, stage in ways
    ]
    found = trained_in(named, folder, ranks)
    trainer = {"zero_stage": 1, **shared}
    moved = settings(folder, "moved-weights", "sft", {"lr": SFT_LR, "steps": 6}, trainer=trainer)
    found["moved-weights"] = train(ranks, "sft", moved, stop=3 if ranks.num_ranks == 2 else None)
    return found


def moved(folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Make steps 1 to 3 on two ranks at ZeRO stage 2, to be continued on one at stage 0, and there a whole training."""
    is_begun = ranks.num_ranks == 2
    own, trainer = {"lr": SFT_LR, "steps": 6}, {"zero_stage": 2 if is_begun else 0}
    moved = train(ranks, "sft", settings(folder, "moved", "sft", own, trainer=trainer), stop=3 if is_begun else None)
    if is_begun:
        return moved
    return {"moved": moved, "whole": train(ranks, "sft", settings(folder, "whole-1", "sft", own, trainer=trainer))}


def main(arguments: Sequence[str]) -> int:
    folder, *names = arguments
    ranks = Ranks()
    cases = {case.__name__: case for case in (resumed, early, layouts, lora_rm, moved, divided, broken_export, merged)}
    found = {}
    for name in names:
        kind, _, argument = name.partition("@")
        if kind in ("killed", "long"):
            found[kind] = {"killed": killed, "long": long}[kind](Path(folder), ranks, argument)
        else:
            found[name] = cases[name](Path(folder), ranks) if name in cases else curve(Path(folder), ranks, name)
    if ranks.is_leader:
        print(json.dumps(found))
    ranks.leave(0)
    return 0
