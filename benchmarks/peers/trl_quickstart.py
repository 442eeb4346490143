"""TRL's synchronous GRPOTrainer on the quickstart's task: the baseline of the quickstart's timing.

Same model after the same warm-up, same prompts, same optimizer, schedule, group size and number of steps;
loss and batch shape are TRL's fastest ones here. Needs a separate environment:

    python3 -m venv trl && trl/bin/pip install torch==2.13.0 trl==1.16.0 accelerate datasets transformers==5.23.0
    OMP_NUM_THREADS=1 trl/bin/python benchmarks/peers/trl_quickstart.py --model runs/quickstart/sft --data runs/quickstart/data

Prints one JSON line: steps, wall and CPU seconds of the 150 steps, and of the whole process.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

START = time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="model folder after the warm-up")
    parser.add_argument("--data", type=Path, required=True, help="folder with train.jsonl and eval.jsonl")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--threads", type=int, default=1, help="torch threads; 2 lets TRL use both cores")
    options = parser.parse_args()

    import torch
    from datasets import Dataset
    from torch.optim.lr_scheduler import LambdaLR
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows = [json.loads(line) for line in (options.data / "train.jsonl").open()]
    held_out = [json.loads(line) for line in (options.data / "eval.jsonl").open()]

    def reward(completions, ground_truth, **_):
        texts = [c[0]["content"] if isinstance(c, list) else c for c in completions]
        return [float(text.strip() == truth) for text, truth in zip(texts, ground_truth, strict=True)]

    config = GRPOConfig(
        output_dir="/tmp/trl-quickstart", max_steps=options.steps, per_device_train_batch_size=192,
        gradient_accumulation_steps=2, num_generations=8, max_completion_length=9, temperature=1.0, beta=0.0,
        num_iterations=1, loss_type="dapo", scale_rewards="group", max_grad_norm=1.0, use_cpu=True, bf16=False,
        gradient_checkpointing=False, dataloader_num_workers=0, dataloader_pin_memory=False, disable_tqdm=True,
        logging_strategy="no", report_to="none", save_strategy="no", shuffle_dataset=False,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.98), weight_decay=0.0)
    decay = LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / 10) * max(0.1, 1.0 - 0.9 * max(0, step - 10) / (options.steps - 10)),
    )
    trainer = GRPOTrainer(
        model=model, processing_class=tokenizer, reward_funcs=reward, args=config,
        train_dataset=Dataset.from_list(rows), optimizers=(optimizer, decay),
    )  # fmt: skip

    wall, cpu = time.monotonic(), time.process_time()
    trainer.train()
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    print(
        json.dumps(
            {
                "steps": options.steps,
                "threads": options.threads,
                "train_wall_s": round(wall, 1),
                "train_cpu_s": round(cpu, 1),
                "accuracy_after": _accuracy(model, tokenizer, held_out),
                "wall_s": round(time.monotonic() - START, 1),
                "cpu_s": round(sum(os.times()[:4]), 1),
            }
        )
    )


def _accuracy(model, tokenizer, rows) -> float:
    import torch

    prompts = [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"]
        for row in rows
    ]
    model.eval()
    with torch.no_grad():
        out = model.generate(
            torch.tensor(prompts), attention_mask=torch.ones(len(prompts), len(prompts[0]), dtype=torch.long),
            max_new_tokens=9, do_sample=False,
        )  # fmt: skip
    texts = tokenizer.batch_decode(out[:, len(prompts[0]) :], skip_special_tokens=True)
    return sum(t.strip() == row["ground_truth"] for t, row in zip(texts, rows, strict=True)) / len(rows)


if __name__ == "__main__":
    main()
