"""TRL's synchronous GRPOTrainer on a run of `penstock recipe`: same model after the warm-up, data and number of samples.

Reads the recipe's run file for steps, sizes, learning rate and number format. Needs a separate environment:

    python3 -m venv trl && trl/bin/pip install torch==2.13.0 trl==1.16.0 accelerate datasets transformers==5.23.0
    OMP_NUM_THREADS=2 trl/bin/python benchmarks/peers/trl_real_model.py runs/smollm2/run.toml

Prints one JSON line: held-out reward before and after, wall and CPU seconds of the steps and of the whole process.
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
    options = parser.parse_args()
    run = tomllib.loads(options.run_file.read_text())

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
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
        texts = [one[0]["content"] for one in completions]
        return [float(text.strip() == truth) for text, truth in zip(texts, ground_truth, strict=True)]

    rollout, trainer = run["rollout"], run["trainer"]
    samples = rollout["groups_per_step"] * rollout["group_size"]
    config = GRPOConfig(
        output_dir="/tmp/trl-real-model", max_steps=trainer["steps"],
        per_device_train_batch_size=samples // PASSES, gradient_accumulation_steps=PASSES,
        num_generations=rollout["group_size"], max_completion_length=rollout["max_new_tokens"], temperature=1.0, beta=0.0,
        num_iterations=1, loss_type="dapo", scale_rewards="group", max_grad_norm=1.0, use_cpu=True, bf16=is_bfloat16,
        learning_rate=trainer["lr"], lr_scheduler_type="constant_with_warmup", warmup_steps=trainer["warmup_steps"],
        adam_beta2=0.95, gradient_checkpointing=False, dataloader_num_workers=0, dataloader_pin_memory=False,
        disable_tqdm=True, logging_strategy="no", report_to="none", save_strategy="no", shuffle_dataset=False,
        seed=run["run"]["seed"],
    )  # fmt: skip
    before = _held_out_reward(model, tokenizer, held_out, rollout["max_new_tokens"], is_bfloat16)
    learner = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(train),
    )
    wall, cpu = time.monotonic(), time.process_time()
    learner.train()
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    after = _held_out_reward(model, tokenizer, held_out, rollout["max_new_tokens"], is_bfloat16)
    figures = {
        "steps": trainer["steps"], "held_out_before": before, "held_out_after": after, "train_wall_s": round(wall, 1),
        "train_cpu_s": round(cpu, 1), "wall_s": round(time.monotonic() - START, 1), "cpu_s": round(sum(os.times()[:4]), 1),
    }  # fmt: skip
    print(json.dumps(figures))


def _held_out_reward(model, tokenizer, rows, max_new_tokens: int, is_bfloat16: bool) -> float:
    import torch

    tokenizer.padding_side = "left"
    texts = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False) for row in rows]
    given = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_bfloat16):
        out = model.generate(**given, max_new_tokens=max_new_tokens, do_sample=False)
    answers = tokenizer.batch_decode(out[:, given["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(a.strip() == row["ground_truth"] for a, row in zip(answers, rows, strict=True)) / len(rows)


if __name__ == "__main__":
    main()
