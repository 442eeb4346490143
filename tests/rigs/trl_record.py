"""Records what TRL's trainers compute on fixed inputs: the fixtures of `tests/fine_tuning`.

Needs a separate environment, with this repository importable in it:

    python3 -m venv trl && trl/bin/pip install torch==2.13.0 trl==1.16.0 accelerate datasets transformers==5.23.0 -e .
    OMP_NUM_THREADS=1 trl/bin/python -m tests.rigs.trl_record curves     # tests/data/trl/curves.json
    OMP_NUM_THREADS=1 trl/bin/python -m tests.rigs.trl_record losses     # tests/data/trl/losses.json

*curves*: 50 steps of SFTTrainer, DPOTrainer and RewardTrainer on the model of the quickstart (seed 0) and the rows of
`tests/fine_tuning/trl_rows.py`, tokenised by Penstock, in their order: float32, AdamW (0.9, 0.999), linear
schedule, batches of 2 x 4. *losses*: `DPOTrainer._compute_loss` in float64 on random log-probabilities, with the gradient
to each of them.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "tests" / "data" / "trl"
LR = 1e-3
DPO_LR = 3e-4
DPO_LOSSES = ("sigmoid", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "apo_zero", "sigmoid_norm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["curves", "losses"])
    what = parser.parse_args().what
    found = record_curves() if what == "curves" else record_losses()
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"{what}.json").write_text(json.dumps(found) + "\n")


def record_curves() -> dict[str, Any]:
    from penstock.deploy.quickstart_task import write_model
    from penstock.protocol.chat_tokenizer import ChatTokenizer
    from tests.fine_tuning.trl_rows import is_good, pairs

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_model(model, seed=0)
        tokenizer = ChatTokenizer.read(model)

        def ids(row: dict[str, Any], answer: str) -> tuple[list[int], list[int]]:
            prompt = tokenizer.render([{"role": "user", "content": row["prompt"]}], add_generation_prompt=True)
            return tokenizer.encode(prompt), [*tokenizer.encode(row[answer]), tokenizer.eos_ids[0]]

        rows = list(pairs())
        chosen, rejected = [ids(row, "chosen") for row in rows], [ids(row, "rejected") for row in rows]
        sft = [{"input_ids": p + c, "completion_mask": [0] * len(p) + [1] * len(c)} for p, c in chosen]
        preferences = [
            {"prompt_ids": p, "chosen_ids": c, "rejected_ids": r}
            for (p, c), (_, r) in zip(chosen, rejected, strict=True)
        ]

        def whole_ids(row: dict[str, Any], answer: str) -> list[int]:
            chat = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[answer]}]
            return tokenizer.encode(tokenizer.render(chat, add_generation_prompt=False))

        whole = [
            {
                "chosen_ids": whole_ids(row, "chosen"),
                "rejected_ids": whole_ids(row, "rejected"),
                "margin": float(number % 3),
            }
            for number, row in enumerate(rows)
        ]
        found: dict[str, Any] = {"sft": run_sft(model, sft), "dft": run_sft(model, sft, loss_type="dft")}
        for name in DPO_LOSSES:
            smoothing = {"robust": 0.1, "exo_pair": 1e-3}.get(name, 0.0)
            found[f"dpo/{name}"] = run_dpo(model, preferences, loss_type=[name], label_smoothing=smoothing)
        found["rm"] = run_rm(model, whole, center_rewards_coefficient=0.01)
        found["wpo"] = run_dpo(model, preferences, loss_type=["sigmoid"], use_weighting=True)
        found["kto"] = run_kto(model, [
            {"prompt_ids": p, "completion_ids": c if is_good(number) else r, "label": is_good(number)}
            for number, ((p, c), (_, r)) in enumerate(zip(chosen, rejected, strict=True))
        ])  # fmt: skip
        return found


def run_sft(model: Path, rows: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(**common(LR), max_length=None, completion_only_loss=True, **options)
    return curve(SFTTrainer, model, config, rows, average=False)


def run_dpo(model: Path, rows: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    from trl import DPOConfig, DPOTrainer

    config = DPOConfig(**common(DPO_LR), max_length=None, **options)
    return curve(DPOTrainer, model, config, rows, average=True, is_tokenised=True)


def run_kto(model: Path, rows: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """One micro-batch a step: TRL estimates the KL on each, with the completion of the row before."""
    from trl import KTOConfig, KTOTrainer

    from tests.fine_tuning.trl_rows import BATCH

    for number, row in enumerate(rows):
        before = number - 1 if number % BATCH else number + BATCH - 1
        row["KL_completion_ids"] = rows[before]["completion_ids"]
    settings = common(DPO_LR) | {"per_device_train_batch_size": BATCH, "gradient_accumulation_steps": 1}
    config = KTOConfig(**settings, max_length=None, **options)
    return curve(KTOTrainer, model, config, rows, average=True, num_parts=1, is_tokenised=True)


def run_rm(model: Path, rows: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    config = RewardConfig(**common(DPO_LR), max_length=None, **options)
    classifier = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
    with torch.no_grad():
        classifier.score.weight.zero_()
    return curve(RewardTrainer, model, config, rows, average=True, loaded=classifier)


def common(lr: float) -> dict[str, Any]:
    from tests.fine_tuning.trl_rows import BATCH, MICRO_BATCHES, NUM_STEPS

    return {
        "output_dir": tempfile.mkdtemp(), "max_steps": NUM_STEPS, "per_device_train_batch_size": BATCH // MICRO_BATCHES,
        "gradient_accumulation_steps": MICRO_BATCHES, "learning_rate": lr, "use_cpu": True, "bf16": False,
        "gradient_checkpointing": False, "train_sampling_strategy": "sequential", "logging_steps": 1,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip


def recording(trainer: Any, *, is_tokenised: bool) -> Any:
    """Return a class of trainers that keep every loss, and take rows as they are if these are tokenised."""

    class Recorded(trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            self.__dict__.setdefault("losses", []).append(float(loss[0] if isinstance(loss, tuple) else loss))
            return loss

        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset if is_tokenised else super()._prepare_dataset(dataset, *args, **kwargs)

    return Recorded


def curve(
    kind: Any,
    model: Path,
    config: Any,
    rows: list[Any],
    *,
    average: bool,
    loaded: Any = None,
    num_parts: int = 2,  # micro-batches of a step: MICRO_BATCHES
    is_tokenised: bool = False,
) -> dict[str, Any]:
    """Return the loss and the gradient norm of each step."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    network = loaded or AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    trainer = recording(kind, is_tokenised=is_tokenised)(
        model=network,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    found = trainer.losses
    sums = [sum(found[at : at + num_parts]) for at in range(0, len(found), num_parts)]
    return {
        "lr": config.learning_rate,
        "losses": [loss / num_parts for loss in sums] if average else sums,
        "grad_norms": [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line],
    }


def record_losses() -> dict[str, Any]:
    """Return inputs, and loss and gradients of every loss type of DPOTrainer."""
    import torch

    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([7, 5, 1, 9, 4, 6, 8, 3, 2, 9, 6, 5])  # 6 chosen, then 6 rejected
    prompt, width = 2, int(lengths.max())
    mask = (torch.arange(width) < lengths[:, None]).long()
    current = -torch.rand(12, width, generator=generator, dtype=torch.float64) * 3 * mask
    reference = -torch.rand(12, width, generator=generator, dtype=torch.float64) * 3 * mask
    log_sum_sq = -torch.rand(12, width, generator=generator, dtype=torch.float64) * mask
    cases: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in (
        "sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down",
        "discopop", "sft", "sigmoid_norm",
    )]  # fmt: skip
    cases += [("robust", {"label_smoothing": 0.1}), ("exo_pair", {"label_smoothing": 1e-3})]
    cases += [("aot", {"label_smoothing": 0.2}), ("aot_unpaired", {"label_smoothing": 0.2})]
    cases += [("discopop", {"discopop_tau": 0.3}), ("sigmoid", {"beta": 0.5}), ("sigmoid", {"ld_alpha": 0.4})]
    cases += [("ipo", {"ld_alpha": 0.4}), ("apo_zero", {"ld_alpha": 0.0})]
    for loss in ("sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "discopop"):
        for form in ("forward_kl", "js_divergence", "alpha_divergence"):
            smoothing = {"robust": 0.1, "exo_pair": 1e-3}.get(loss, 0.0)
            cases.append((loss, {"f_divergence_type": form, "label_smoothing": smoothing}))
    cases += [("sigmoid", {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.0})]
    cases += [(name, {"use_weighting": True}) for name in ("sigmoid", "ipo", "apo_zero", "aot")]
    found = [one_loss(name, options, prompt, mask, current, reference, log_sum_sq) for name, options in cases]
    found.append(
        one_loss(["sigmoid", "bco_pair", "sft"], {"loss_weights": [0.8, 0.2, 1.0]}, prompt, mask, current, reference,
                 log_sum_sq)
    )  # fmt: skip
    return {
        "made_by": "tests/rigs/trl_record.py losses, TRL 1.16.0, float64",
        "lengths": lengths.tolist(), "current": current.tolist(), "reference": reference.tolist(),
        "log_sum_sq": log_sum_sq.tolist(), "cases": found,
    }  # fmt: skip


def one_loss(
    name: Any, options: dict[str, Any], prompt: int, mask: Any, current: Any, reference: Any, log_sum_sq: Any
) -> dict[str, Any]:
    import torch
    from trl import DPOTrainer

    leaf = current.clone().requires_grad_(True)
    full_mask = torch.cat([torch.zeros(len(mask), prompt, dtype=torch.long), mask], dim=1)
    pad = torch.zeros(len(mask), prompt - 1, dtype=torch.float64)

    def outputs(logprobs: Any) -> Any:
        zeros = torch.zeros(len(mask), prompt - 1 + mask.size(1), dtype=torch.float64)
        return SimpleNamespace(
            log_probs=torch.cat([pad.to(logprobs.dtype), logprobs], dim=1), log_sum_sq_probs=torch.cat([pad, log_sum_sq], dim=1),
            entropy=zeros, mean_logits=zeros, is_top1=zeros.bool(),
        )  # fmt: skip

    class Model:
        training = True

        def __init__(self, logprobs: Any) -> None:
            self._logprobs = logprobs

        def __call__(self, **_: Any) -> Any:
            return outputs(self._logprobs)

    given = {"beta": 0.1, "label_smoothing": 0.0, "discopop_tau": 0.05, "f_divergence_type": "reverse_kl",
             "f_alpha_divergence_coef": 0.5, "ld_alpha": None, "use_weighting": False, **options}  # fmt: skip
    names = [name] if isinstance(name, str) else name
    gather = SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x, gather=lambda x: x, unwrap_model=lambda x: x)
    from collections import defaultdict

    ids = torch.ones_like(full_mask)
    trainer = SimpleNamespace(
        model=Model(leaf), ref_model=Model(reference), accelerator=gather, aux_loss_enabled=False,
        precompute_ref_logps=False, ld_alpha=given["ld_alpha"], f_divergence_type=given["f_divergence_type"],
        f_alpha_divergence_coef=given["f_alpha_divergence_coef"], beta=given["beta"], loss_types=names,
        loss_weights=given.get("loss_weights", [1.0] * len(names)), label_smoothing=given["label_smoothing"],
        use_weighting=given["use_weighting"], _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0,
        _tp_size=1, args=SimpleNamespace(discopop_tau=given["discopop_tau"], gradient_checkpointing_kwargs=None),
    )  # fmt: skip
    inputs = {"input_ids": ids, "attention_mask": ids, "completion_mask": full_mask}
    import trl.trainer.dpo_trainer as module

    module.disable_gradient_checkpointing = lambda *_: torch.no_grad()
    module.is_peft_model = lambda _: False
    # TRL's alpha divergence looks its clamp up by dtype, and has no entry for float64
    if given["f_divergence_type"] == "alpha_divergence" and abs(given["f_alpha_divergence_coef"] - 1.0) > 1e-6:
        leaf = current.float().clone().requires_grad_(True)
        trainer.model, trainer.ref_model = Model(leaf), Model(reference.float())
    loss = DPOTrainer._compute_loss(trainer, trainer.model, inputs, return_outputs=False)
    loss.backward()
    assert math.isfinite(float(loss)), (name, options)
    metrics = {key: value[0] for key, value in trainer._metrics["train"].items() if key.startswith("rewards/")}
    return {
        "loss_type": name, "options": given | ({"loss_weights": given["loss_weights"]} if "loss_weights" in given else {}),
        "float32": leaf.dtype == torch.float32, "loss": float(loss), "grad": leaf.grad.tolist(), "metrics": metrics,
    }  # fmt: skip


if __name__ == "__main__":
    main()
