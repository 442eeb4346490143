"""Log-probabilities of an engine and of the trainer for the same tokens of a mixture of experts, with its experts replayed and without.

python -m benchmarks.router_replay [--experts 16] [--top-k 4] [--layers 4] [--sequences 32] [--seed 0]
python -m benchmarks.router_replay --run FOLDER     # a run of the whole system with trainer.router_replay, and its replay

A Qwen3-MoE with the quickstart's tokenizer is made, trained on its sorting examples for a moment so that its routers
prefer something, and served by the embedded engine, which samples completions, and episodes of three turns with a fork behind the first. The
trainer's forward pass (float32) scores the same tokens with the same weights, or with those after one more optimizer step; in the last lines the engine
gets these between the turns of the episodes, and the trainer has them. Prints one JSON line for each pair.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import torch

from penstock.deploy.quickstart_task import write_data, write_model
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.facts import Sampling
from penstock.protocol.trajectory import Trajectory
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.checks.check_task import ModelLimits
from penstock.rollout_service.engines.sglang.client import SglangClient
from penstock.rollout_service.environments.build_trajectory import build_trajectory
from penstock.rollout_service.proxy.agent_request import AgentRequest, RetryMark
from penstock.rollout_service.proxy.answer_formats.answer_format import ANSWER_FORMATS
from penstock.rollout_service.proxy.build_episode import stored_rows
from penstock.rollout_service.proxy.messages import Message
from penstock.rollout_service.proxy.plan_prompt import PromptPlanner
from penstock.rollout_service.proxy.renderer import ChatRenderer
from penstock.rollout_service.proxy.session import AgentModel, EpisodeSession
from penstock.rollout_service.proxy.settings import EpisodeLimits
from penstock.trainer.algorithm.batch import Row, build
from penstock.trainer.learner.logprobs import CompletionScorer

_START_S = 120.0
_WARM_UP = 150  # optimizer steps on examples


def main() -> int:
    """Measure, or run; returns an exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=32, help="prompts, each with four completions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run", type=Path, help="train with the whole system in this folder instead")
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    if given.run is not None:
        return run(given.run.absolute(), given)
    with tempfile.TemporaryDirectory(prefix="router-replay-") as scratch:
        folder = Path(scratch)
        model, examples = make(folder, given)
        later = {}
        for rate in (1e-5, 1e-4, 1e-3):
            later[rate] = one_step_later(folder, examples, rate)
        for dtype in ("float32", "bfloat16"):
            for what, draw in (("completions", sample), ("episodes", play)):
                rows = asyncio.run(draw(folder, dtype, given.sequences))
                show(what, dtype, "the same weights", compare(model, rows))
                for rate, newer in later.items():
                    show(what, dtype, f"one step of {rate:g} later", compare(newer, rows))
        for rate, newer in later.items():
            newer.save_pretrained(folder / "newer")
            rows = asyncio.run(play(folder, "float32", given.sequences, update=folder / "newer"))
            for name, chosen in (("before", 0), ("after", 1)):
                figures = compare(newer, rows, version=chosen)
                show(f"tokens of episodes {name} a step of {rate:g}", "float32", "those after it", figures)
    return 0


def show(rows: str, engine: str, trainer: str, figures: dict[str, Any]) -> None:
    """Print one line."""
    print(json.dumps({"rows": rows, "engine": engine, "trainer": trainer, **figures}), flush=True)


def make(folder: Path, given: argparse.Namespace) -> tuple[Any, list[torch.Tensor]]:
    """Write a mixture of experts with the quickstart's tokenizer and examples, warmed up; return it, and the examples."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    write_model(folder / "model", seed=given.seed)
    write_data(folder, seed=given.seed, num_sft=2000, num_train=2000, num_eval=100)
    dense = json.loads((folder / "model" / "config.json").read_text())
    config = Qwen3MoeConfig(
        vocab_size=dense["vocab_size"], hidden_size=64, moe_intermediate_size=32, num_hidden_layers=given.layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=given.experts, num_experts_per_tok=given.top_k,
        norm_topk_prob=True, max_position_embeddings=1024, eos_token_id=dense["eos_token_id"],
        pad_token_id=dense["pad_token_id"], tie_word_embeddings=True,
    )  # fmt: skip
    model: Any = Qwen3MoeForCausalLM(config)
    tokenizer = ChatTokenizer.read(folder / "model")
    examples = []
    for line in (folder / "sft.jsonl").read_text().splitlines():
        messages = json.loads(line)["messages"]
        prompt = encoded(tokenizer, messages[:1])
        examples.append(torch.tensor([*prompt, *tokenizer.encode(messages[1]["content"]), dense["eos_token_id"]]))
    train(model, examples, _WARM_UP, 3e-3)
    model.save_pretrained(folder / "model")
    return model.eval(), examples


def encoded(tokenizer: ChatTokenizer, messages: list[dict[str, str]]) -> list[int]:
    """Return the token ids of a prompt."""
    return tokenizer.encode(tokenizer.render(messages, add_generation_prompt=True))


def train(model: Any, examples: list[torch.Tensor], num_steps: int, rate: float) -> None:
    """Make optimizer steps on examples of equal length."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    by_length: dict[int, list[torch.Tensor]] = {}
    for one in examples:
        by_length.setdefault(len(one), []).append(one)
    lengths = sorted(by_length)
    for step in range(num_steps):
        held = by_length[lengths[step % len(lengths)]]
        first = (step * 16) % max(1, len(held) - 16)
        batch = torch.stack(held[first : first + 16])
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def one_step_later(folder: Path, examples: list[torch.Tensor], rate: float) -> Any:
    """Return the model after one optimizer step."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    train(model.train(), examples, 1, rate)
    return model.eval()


@contextmanager
def engine(folder: Path, dtype: str) -> Iterator[str]:
    """Serve the model; yields the address."""
    port_file = folder / f"{dtype}.port"
    port_file.unlink(missing_ok=True)  # of the engine before
    command = [sys.executable, "-m", "penstock.rollout_service.embedded_engine", "--model-path", str(folder / "model")]
    command += ["--port", "0", "--port-file", str(port_file), "--die-with-parent", "--weight-version", "0"]
    with (folder / f"{dtype}.log").open("wb") as log:
        serving = subprocess.Popen([*command, "--dtype", dtype], stdout=log, stderr=log)
        try:
            ends = time.monotonic() + _START_S
            while not (port_file.exists() and (port := port_file.read_text().strip())):
                if serving.poll() is not None or time.monotonic() > ends:
                    raise SystemExit(f"the engine did not start within {_START_S:g} s; see {log.name}")
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            serving.terminate()
            serving.wait()


@asynccontextmanager
async def serving(folder: Path, dtype: str) -> AsyncIterator[tuple[SglangClient, Sampling]]:
    """Serve the model; yields a client, and how to sample so that it names the experts of each token."""
    limits = ModelLimits.of(folder / "model")
    assert limits.routers is not None
    with engine(folder, dtype) as url:
        client = SglangClient(url)
        client.limits = limits
        await client.load_weights(folder / "model", PolicyVersion(0))
        yield client, Sampling(max_new_tokens=48, routers=limits.routers.shape)
        await client.close()


def prompts_of(folder: Path, number: int) -> list[list[dict[str, str]]]:
    """Return the messages of training prompts."""
    return [json.loads(line)["prompt"] for line in (folder / "train.jsonl").read_text().splitlines()[:number]]


async def sample(folder: Path, dtype: str, num_prompts: int) -> list[Trajectory]:
    """Return four completions of each prompt, of an engine that computes in ``dtype``."""
    tokenizer = ChatTokenizer.read(folder / "model")
    prompts = [encoded(tokenizer, messages) for messages in prompts_of(folder, num_prompts)]
    async with serving(folder, dtype) as (client, sampling):
        found = await client.generate(prompts, sampling, 4, seeds=list(range(len(prompts))))
    return [build_trajectory(prompt, one) for prompt, ones in zip(prompts, found, strict=True) for one in ones]


async def play(folder: Path, dtype: str, num_episodes: int, *, update: Path | None = None) -> list[Trajectory]:
    """Return the rows of episodes: three answers one after the other, and another second one; the third after an ``update``."""
    tokenizer = ChatTokenizer.read(folder / "model")
    planner = PromptPlanner(ChatRenderer(tokenizer), frozenset(tokenizer.eos_ids), "keep")
    model = AgentModel(planner, ANSWER_FORMATS.find("hermes").value, None)
    asked = prompts_of(folder, 4 * num_episodes)
    rows: list[Trajectory] = []
    async with serving(folder, dtype) as (client, sampling):
        sessions = [
            EpisodeSession(f"e{n}", model, client, sampling, EpisodeLimits(), seed=n) for n in range(num_episodes)
        ]

        async def ask(number: int, messages: tuple[Message, ...], text: str) -> tuple[Message, ...]:
            session, given = sessions[number], (*messages, Message("user", text))
            turn = await session.answer(AgentRequest(given), RetryMark(b"%d" % len(session.tree.turns)))
            turn.delivered = True
            return (*given, turn.answer)

        async def begin(number: int, texts: list[str]) -> tuple[Message, ...]:
            first = await ask(number, (), texts[0])
            await ask(number, first, texts[1])
            return await ask(number, first, texts[2])

        texts = [[one[0]["content"] for one in asked[4 * n : 4 * n + 4]] for n in range(num_episodes)]
        begun = await asyncio.gather(*(begin(n, own) for n, own in enumerate(texts)))
        if update is not None:
            await client.load_weights(update, PolicyVersion(1))
        await asyncio.gather(*(ask(n, begun[n], own[3]) for n, own in enumerate(texts)))
        for session in sessions:
            rows += [row.trajectory for row in stored_rows(session.end(), session.tree.turns)]
    return rows


def compare(model: Any, sampled: list[Trajectory], *, version: int | None = None) -> dict[str, Any]:
    """Return how far the trainer's log-probabilities are from the engine's, and how many tokens have other experts.

    Of tokens that one ``version`` sampled; None: of all.
    """
    rows, versions = [], []
    for one in sampled:
        assert one.experts is not None
        rows.append(Row(one.token_ids, one.loss_mask, one.behaviour_logprobs, 1.0, 1.0, experts=one.experts.ids))
        versions += [int(run.version) for run in one.version_runs for _ in range(run.start, run.end)]
    scorer = CompletionScorer(model, 1.0)
    if not hasattr(model, "is_prepared"):
        scorer.replay_routers()
        model.is_prepared = True
    batch = build(rows)
    given = {"position_ids": batch.position_ids, "layout": batch.layout}
    with torch.no_grad():
        plain = scorer(batch.input_ids, batch.predictors, batch.targets, **given)
        replayed = scorer(batch.input_ids, batch.predictors, batch.targets, experts=batch.experts, **given)
    assert scorer.routing is not None
    changed, total = scorer.routing.figures().tolist()
    wanted = torch.tensor([version in (None, one) for one in versions])
    gaps = [(found - batch.behaviour_logprobs).abs()[wanted] for found in (plain, replayed)]
    # Of sampled tokens: whose predecessor, from whose output they are drawn, was given other experts in some layer.
    rerouted = torch.stack(list(scorer.routing.changed.values())).any(0)[batch.predictors][wanted]
    of_rerouted = [round(float(gap[rerouted].mean()), 5) if rerouted.any() else None for gap in gaps]
    return {
        "tokens": int(wanted.sum()),
        "gap": round(float(gaps[0].mean()), 7),
        "gap_replayed": round(float(gaps[1].mean()), 7),
        "largest_gap": round(float(gaps[0].max()), 5),
        "largest_gap_replayed": round(float(gaps[1].max()), 5),
        "gap_of_rerouted": of_rerouted[0],
        "gap_of_rerouted_replayed": of_rerouted[1],
        "rerouted_layers": round(changed / total, 5),  # of (token, layer) pairs
        "rerouted_tokens": round(float(rerouted.double().mean()), 5),  # of these tokens, in some layer
    }


def run(folder: Path, given: argparse.Namespace) -> int:
    """Train with every service on this machine, and replay the run; returns an exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    make(folder, given)
    environ = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    settings = [
        "run.id=experts", f"run.dir={folder}", f"model.path={folder / 'model'}", f"data.train={folder / 'train.jsonl'}",
        "reward.name=exact_match", "rollout.group_size=8", "rollout.groups_per_step=16", "rollout.max_new_tokens=16", "rollout.max_staleness=2",
        "trainer.steps=20", "trainer.lr=5e-4", "trainer.router_replay=true",
    ]  # fmt: skip
    penstock = [sys.executable, "-m", "penstock"]
    train_command = [*penstock, "train", "--local", *settings]
    code = subprocess.run(train_command, env=environ, cwd=folder, check=False, stdout=sys.stderr).returncode
    metrics = folder / "experts" / "metrics.jsonl"
    for line in metrics.read_text().splitlines():
        row = json.loads(line)
        if row.get("kind") == "step":
            names = ("step", "reward_mean", "logprob_gap", "mismatch", "rerouted_fraction", "staleness_mean")
            print(json.dumps({name: row[name] for name in names if name in row}))
    return code


if __name__ == "__main__":
    sys.exit(main())
