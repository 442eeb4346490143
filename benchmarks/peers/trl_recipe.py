"""TRL's synchronous GRPOTrainer on a run of `penstock recipe`: same model after the warm-up, data and number of samples.

Reads the recipe's run file for steps, sizes, learning rate and number format. Needs a separate environment:

    python3 -m venv trl && trl/bin/pip install torch==2.13.0 trl==1.16.0 accelerate datasets transformers==5.23.0
    OMP_NUM_THREADS=2 trl/bin/python benchmarks/peers/trl_recipe.py runs/smollm2/run.toml

Prints a JSON line at every evaluation: steps, samples, held-out reward, wall and CPU seconds of the steps (evaluations left out) and
of the whole process. `--steps` ends before the run file's number of steps; the learning rate is constant after its warm-up, so that a
shorter run is the beginning of the longer one.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import tomllib
from pathlib import Path

START = time.monotonic()
PASSES = 8  # backward passes of an optimizer step; one pass over its 256 samples needs more than 12 GB of memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_file", type=Path)
    parser.add_argument("--steps", type=int, help="default: those of the run file")
    options = parser.parse_args()
    run = tomllib.loads(options.run_file.read_text())

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(run["run"]["seed"])
    is_bfloat16 = run["model"]["dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(run["model"]["path"], dtype=torch.float32)  # autocast computes in bf16
    tokenizer = AutoTokenizer.from_pretrained(run["model"]["path"])
    system = {"role": "system", "content": run["data"]["system_prompt"]}
    train, held_out = (
        [
            {**row, "prompt": [system, *row["prompt"]]}
            for row in map(json.loads, Path(run["data"][key]).read_text().splitlines())
        ]
        for key in ("train", "eval")
    )

    def reward(completions, ground_truth, **_):
        texts = [completion[0]["content"] for completion in completions]
        return [float(text.strip() == truth) for text, truth in zip(texts, ground_truth, strict=True)]

    rollout, trainer = run["rollout"], run["trainer"]
    samples = rollout["groups_per_step"] * rollout["group_size"]
    config = GRPOConfig(
        output_dir="/tmp/trl-recipe", max_steps=options.steps or trainer["steps"],
        per_device_train_batch_size=samples // PASSES, gradient_accumulation_steps=PASSES,
        num_generations=rollout["group_size"], max_completion_length=rollout["max_new_tokens"], temperature=1.0, beta=0.0,
        num_iterations=1, loss_type="dapo", scale_rewards="group", max_grad_norm=1.0, use_cpu=True, bf16=is_bfloat16,
        learning_rate=trainer["lr"], lr_scheduler_type="constant_with_warmup", warmup_steps=trainer["warmup_steps"],
        adam_beta2=0.95, gradient_checkpointing=False, dataloader_num_workers=0, dataloader_pin_memory=False,
        disable_tqdm=True, logging_strategy="no", report_to="none", save_strategy="no", shuffle_dataset=False,
        seed=run["run"]["seed"],
    )  # fmt: skip
    spent = {"wall_s": 0.0, "cpu_s": 0.0}

    def evaluate(step: int, seconds_before: tuple[float, float] | None) -> None:
        if seconds_before is not None:
            spent["wall_s"] += time.monotonic() - seconds_before[0]
            spent["cpu_s"] += time.process_time() - seconds_before[1]
        figures = {
            "steps": step, "samples": step * samples,
            "held_out": _held_out_reward(model, tokenizer, held_out, rollout["max_new_tokens"], is_bfloat16),
            "train_wall_s": round(spent["wall_s"], 1), "train_cpu_s": round(spent["cpu_s"], 1),
            "wall_s": round(time.monotonic() - START, 1), "cpu_s": round(sum(os.times()[:4]), 1),
        }  # fmt: skip
        print(json.dumps(figures), flush=True)

    class Evaluation(TrainerCallback):
        """Evaluates before the first step and as often as Penstock does; leaves that time out of the training's."""

        def on_train_begin(self, args, state, control, **_):
            evaluate(0, None)
            self.since = time.monotonic(), time.process_time()

        def on_step_end(self, args, state, control, **_):
            if state.global_step % run["eval"]["every"] == 0 or state.global_step == state.max_steps:
                evaluate(state.global_step, self.since)
                model.train()
                self.since = time.monotonic(), time.process_time()

    GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(train),
        callbacks=[Evaluation()],
    ).train()


def _held_out_reward(model, tokenizer, rows, max_new_tokens: int, is_bfloat16: bool) -> float:
    import torch

    tokenizer.padding_side = "left"
    texts = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False) for row in rows]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_bfloat16):
        out = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    answers = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(a.strip() == row["ground_truth"] for a, row in zip(answers, rows, strict=True)) / len(rows)


if __name__ == "__main__":
    main()
