"""Episodes of a mixture of experts, from engine to trainer: each token is computed with its own experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.contracts.engine_under_test import embedded_engine
from tests.contracts.tiny_model import MIXTURE, build_model, write_changed_copy
from tests.rollout_service.embedded_engine.test_embedded_experts import chosen_by_transformers
from transformers import AutoModelForCausalLM

from penstock.agents.proxy.answer_formats.answer_format import ANSWER_FORMATS
from penstock.agents.proxy.messages import AgentRequest, Message, RetryMark
from penstock.agents.proxy.plan_prompt import PromptPlanner
from penstock.agents.proxy.renderer import ChatRenderer
from penstock.agents.proxy.rows import stored_rows
from penstock.agents.proxy.session import AgentModel, EpisodeLimits, EpisodeSession
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.episode import Episode
from penstock.protocol.groups import RewardRequest, RouterShape, Sampling
from penstock.protocol.packs import group_pack
from penstock.protocol.trajectory import Group
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.checks.check_task import ModelLimits
from penstock.rollout_service.engines.sglang.client import SglangClient
from penstock.trainer.algorithm.batch import MicroBatch, Row, build
from penstock.trainer.algorithm.packed_rows import BRANCH_TOKENS
from penstock.trainer.learner.logprobs import CompletionScorer, read_batch

SHAPE = RouterShape(num_layers=2, num_experts=8, top_k=2)


async def play(folder: Path, changed: Path, log: Path) -> Episode:
    """Play an episode: two turns and a fork behind the first; then, with other weights, one that goes on from each."""
    tokenizer = ChatTokenizer.read(folder)
    planner = PromptPlanner(ChatRenderer(tokenizer), frozenset(tokenizer.eos_ids), "keep")
    model = AgentModel(planner, ANSWER_FORMATS.find("hermes").value, 8192)
    with embedded_engine(folder, log, "--weight-version", "0") as engine:
        client = SglangClient(engine.url)
        client.limits = ModelLimits.of(folder)
        await client.load_weights(folder, PolicyVersion(0))
        session = EpisodeSession(
            "e", model, client, Sampling(max_new_tokens=24, routers=SHAPE), EpisodeLimits(), seed=5
        )

        async def ask(*messages: Message) -> tuple[Message, ...]:
            turn = await session.answer(AgentRequest(messages), RetryMark(b"%d" % len(session.tree.turns)))
            turn.delivered = True
            return (*messages, turn.answer)

        first = await ask(Message("system", "what is 1 + 1? hello world " * 3), Message("user", "hello"))
        left, right = [await ask(*first, Message("user", text)) for text in ("what is", "the answer is")]
        await client.load_weights(changed, PolicyVersion(1))
        for said in (left, right):
            await ask(*said, Message("user", "2"))
        made = session.end()
        await client.close()
    return Episode(
        "e", "e0.p0.a0", 0, "agent", "", 0, "done", stored_rows(made, session.tree.turns), reward=1.0,
    )  # fmt: skip


def as_rows(group: Group) -> list[Row]:
    return [
        Row(
            trajectory.token_ids,
            trajectory.loss_mask,
            trajectory.behaviour_logprobs,
            1.0,
            0.1,
            experts=trajectory.experts and trajectory.experts.ids,
        )
        for trajectory in group.trajectories
    ]


def scored(scorer: CompletionScorer, batch: MicroBatch, *, replays: bool) -> torch.Tensor:
    """Return log-probabilities of a batch, with its experts or those that the routers choose now."""
    more: dict[str, Any] = {"experts": batch.experts} if replays else {}
    return read_batch(scorer, batch, **more)


async def test_the_rows_of_an_episode_are_computed_with_the_experts_of_their_turns(tmp_path: Path) -> None:
    """Through the pack, in one stream that computes shared tokens once; the engine changed weights in the middle."""
    build_model(tmp_path / "model", "qwen3_moe", **MIXTURE)
    changed = write_changed_copy(tmp_path / "model", tmp_path / "changed", seed=1, scale=0.05)
    episode = await play(tmp_path / "model", changed, tmp_path)
    whole = Group.of_episodes(
        (episode,),
        split="train",
        attempt=0,
        issued_version=0,
        prompt_text="hello",
        reward=RewardRequest(name="environment"),
    )
    (group,) = group_pack.decode(group_pack.encode([whole]), described=[whole.summary(0)])
    assert (group.routers, len(group.trajectories)) == (SHAPE, 2)
    shared = group.episodes[0].rows[1].prefix_len
    rows = as_rows(group)

    # What was sampled before the update, and its context, has the choices of the first weights, the rest the others'.
    for row, turns in zip(group.trajectories, group.turns, strict=True):
        assert row.experts is not None
        last = turns[-1]
        before = row.token_ids[: turns[-2].end]
        expected = chosen_by_transformers(tmp_path / "model", before[:-1].tolist())
        np.testing.assert_array_equal(row.experts.ids[: len(before) - 1], expected)
        # The engine computed the context of the last turn again with the new weights: its tokens follow from that.
        expected = chosen_by_transformers(changed, row.token_ids[:-1].tolist())
        np.testing.assert_array_equal(row.experts.ids[len(before) :], expected[len(before) :])
        assert (expected[: len(before) - 1] != row.experts.ids[: len(before) - 1]).any()
        assert row.version_runs[-1].version == 1
        assert last.start > len(before)

    models = [AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32) for _ in range(2)]
    packed, alone = (CompletionScorer(model, 1.0) for model in models)
    packed.replay_routers()
    alone.replay_routers()
    batch = build(rows)
    total = sum(len(row.token_ids) - 1 for row in rows)
    # All that both rows have alike, but for the fork's last token and a rest that is worth no branch.
    assert shared - BRANCH_TOKENS <= total - batch.input_ids.shape[1] < shared
    found = scored(packed, batch, replays=True)
    each = [scored(alone, build([row]), replays=True) for row in rows]
    torch.testing.assert_close(found, torch.cat(each), rtol=1e-5, atol=1e-5)
    weights = torch.linspace(-1.0, 1.0, len(found))
    (found * weights).sum().backward()
    (torch.cat(each) * weights).sum().backward()
    for one, other in zip(packed.parameters(), alone.parameters(), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=3e-5)

    # Tokens of the first weights: the trainer's are the engine's, with replay and without; those of the others change.
    ages = np.concatenate([version_of(trajectory) for trajectory in group.trajectories])
    gaps = [
        (made.detach() - batch.behaviour_logprobs).abs().numpy()
        for made in (found, scored(packed, batch, replays=False))
    ]
    assert gaps[0][ages == 0].max() < 1e-5
    assert gaps[1][ages == 0].max() < 1e-5
    assert np.abs(gaps[0] - gaps[1])[ages == 1].max() > 1e-3


def version_of(row: Any) -> np.ndarray:
    found = np.full(len(row.token_ids), -1)
    for run in row.version_runs:
        found[run.start : run.end] = run.version
    return found[row.loss_mask]


@pytest.mark.parametrize("depth", [1, 3])
def test_rows_of_a_tree_share_tokens_whose_experts_agree(depth: int) -> None:
    random = np.random.default_rng(0)
    tokens, experts = random.integers(3, 48, 60).astype(np.int32), choices(random, 60)
    rows, starts = [], [20 + 10 * number for number in range(depth + 1)]
    for start in starts:
        own = np.concatenate([tokens[:start], random.integers(3, 48, 12).astype(np.int32)])
        chosen = np.concatenate([experts[:start], choices(random, 11)])
        rows.append(Row(own, np.arange(len(own)) >= start, np.zeros(len(own), np.float32), 1.0, 0.1, experts=chosen))
    num_tokens = sum(len(row.token_ids) - 1 for row in rows)
    batch = build(rows)
    assert batch.experts is not None
    assert batch.experts.shape[0] == batch.input_ids.shape[1] == num_tokens - sum(starts[:-1])
    rows[0] = replace(rows[0], experts=choices(random, len(rows[0].token_ids) - 1))
    assert build(rows).input_ids.shape[1] == num_tokens - sum(starts[1:-1])


def choices(random: np.random.Generator, num_tokens: int) -> np.ndarray:
    return np.sort(random.random((num_tokens, 2, 8)).argsort(-1)[..., :2], -1).astype(np.uint8)
