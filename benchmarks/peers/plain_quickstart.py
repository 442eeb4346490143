"""The quickstart's reinforcement learning as one plain script: one process, torch and transformers, no services.

Same model after the same warm-up, same prompts, group size, loss, optimizer and schedule as `penstock quickstart`, on policy:
`generate`, reward, one step on all samples, and the same greedy evaluations. The baseline of the quickstart's CPU time:

    OMP_NUM_THREADS=1 python benchmarks/peers/plain_quickstart.py --model runs/quickstart/sft --data runs/quickstart/data

Prints one JSON line: wall and CPU seconds of the steps, of the evaluations, and of the whole process.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

START = time.monotonic()
GROUPS, SAMPLES, NEW_TOKENS, LR, WARMUP = 48, 8, 9, 5e-4, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="model folder after the warm-up")
    parser.add_argument("--data", type=Path, required=True, help="folder with train.jsonl and eval.jsonl")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    options = parser.parse_args()

    import torch
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    end = tokenizer.eos_token_id

    def read(name: str):
        rows = [json.loads(line) for line in (options.data / name).open()]
        chats = [
            tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False) for row in rows
        ]
        return torch.tensor(tokenizer(chats, add_special_tokens=False)["input_ids"]), [
            row["ground_truth"] for row in rows
        ]

    def answers(ids) -> list[str]:
        return [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]

    def generate(prompts, **how):
        with torch.no_grad():
            mask = torch.ones_like(prompts)
            return model.generate(
                prompts, attention_mask=mask, max_new_tokens=NEW_TOKENS, pad_token_id=tokenizer.pad_token_id, **how
            )

    prompts, truths = read("train.jsonl")
    held_out, held_out_truths = read("eval.jsonl")
    width = prompts.shape[1]

    def accuracy() -> float:
        predictions = answers(generate(held_out, do_sample=False)[:, width:])
        return sum(map(str.__eq__, predictions, held_out_truths)) / len(held_out)

    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.98), weight_decay=0.0)
    decay = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            min(1.0, (step + 1) / WARMUP) * max(0.1, 1.0 - 0.9 * max(0, step - WARMUP) / (options.steps - WARMUP))
        ),
    )

    def step(number: int) -> None:
        some = slice(number * GROUPS, (number + 1) * GROUPS)
        rows = generate(prompts[some].repeat_interleave(SAMPLES, dim=0), do_sample=True, temperature=1.0, top_k=0)
        sampled = rows[:, width:]
        wanted = [truth for truth in truths[some] for _ in range(SAMPLES)]
        rewards = torch.tensor([float(a == b) for a, b in zip(answers(sampled), wanted, strict=True)]).view(
            GROUPS, SAMPLES
        )
        centred = rewards - rewards.mean(1, keepdim=True)
        advantages = (centred / (rewards.std(1, keepdim=True) + 1e-6)).view(-1, 1)
        kept = ((sampled == end).cumsum(1) - (sampled == end).long()) == 0  # up to the first end of turn
        logits = model(input_ids=rows[:, :-1], use_cache=False, logits_to_keep=sampled.shape[1]).logits
        logprobs = -torch.nn.functional.cross_entropy(logits.transpose(1, 2), sampled, reduction="none")
        ratio = (logprobs - logprobs.detach()).exp()
        losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
        optimizer.zero_grad()
        ((losses * kept).sum() / kept.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        decay.step()

    spent = {"train": [0.0, 0.0], "eval": [0.0, 0.0]}

    def timed(what: str, work, *arguments):
        wall, cpu = time.monotonic(), time.process_time()
        outcome = work(*arguments)
        spent[what][0] += time.monotonic() - wall
        spent[what][1] += time.process_time() - cpu
        return outcome

    accuracies = [timed("eval", accuracy)]
    for number in range(options.steps):
        timed("train", step, number)
        if (number + 1) % max(1, options.steps // 6) == 0 or number + 1 == options.steps:
            accuracies.append(timed("eval", accuracy))
    print(
        json.dumps(
            {
                "steps": options.steps,
                "threads": options.threads,
                **{f"{what}_{kind}_s": round(s, 1) for what, both in spent.items() for kind, s in zip(("wall", "cpu"), both, strict=True)},
                "accuracy_before": accuracies[0],
                "accuracy_after": accuracies[-1],
                "evaluations": len(accuracies),
                "wall_s": round(time.monotonic() - START, 1),
                "cpu_s": round(sum(os.times()[:4]), 1),
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
