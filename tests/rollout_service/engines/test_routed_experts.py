"""Which experts computed each token: asked for, read, and refused where an answer cannot be right."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.contracts.engine_under_test import embedded_engine
from tests.contracts.tiny_model import MIXTURE, build_model
from tests.groups import make_task
from tests.rollout_service.embedded_engine.test_embedded_experts import chosen_by_transformers

from penstock.protocol.groups import RouterShape, Sampling
from penstock.protocol.token_annotations import ExpertChoices, Routers, routers_of
from penstock.protocol.versions import PolicyVersion, VersionRun
from penstock.rollout_service.checks.check_task import ModelLimits
from penstock.rollout_service.engines.completion import Completion, Resumption
from penstock.rollout_service.engines.sglang.client import SglangClient
from penstock.rollout_service.engines.sglang.messages import read_experts
from penstock.rollout_service.engines.stop_strings import ended_at
from penstock.rollout_service.environments.single_turn import SINGLE_TURN
from penstock.rollout_service.errors import ReplyRefused, TaskRefused

ROUTERS = Routers(layers=(0, 2), num_experts=8, top_k=2)
V0 = PolicyVersion(0)
PROMPTS = [[5, 17, 88, 250, 31, 9], [44, 45]]


def answer(ids: np.ndarray) -> dict[str, Any]:
    return {"routed_experts": base64.b64encode(ids.astype("<i4").tobytes()).decode()}


def valid() -> np.ndarray:
    """Three tokens, three layers (the second without experts), two experts each."""
    return np.array([[[3, 1], [0, 0], [7, 2]], [[5, 0], [0, 0], [6, 4]], [[2, 1], [0, 0], [0, 1]]])


def test_the_answer_is_read_by_layers_with_experts() -> None:
    """As SGLang documents it: base64 of int32 [tokens - 1, layers, k]; dense layers are dropped, experts sorted."""
    found = read_experts(answer(valid()), ROUTERS, 3, num_tokens=4)
    assert found.shape == ROUTERS.shape
    assert found.ids.dtype == np.uint8
    assert found.ids.tolist() == [[[1, 3], [2, 7]], [[0, 5], [4, 6]], [[1, 2], [0, 1]]]


def _changed(expert: int) -> np.ndarray:
    ids = valid()
    ids[1, 2, 0] = expert
    return ids


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({}, r"does not say which experts .* --enable-return-routed-experts"),
        ({"routed_experts": "%%"}, "is not base64 of int32"),
        ({"routed_experts": "AAAA"}, "is not base64 of int32"),
        (answer(valid()[:-1]), r"has 12 numbers, expected \[3, 3, 2\]"),
        (answer(_changed(8)), "names expert 8, expected 0 to 7"),
        (answer(_changed(-1)), "names expert -1, expected 0 to 7"),
        (answer(_changed(4)), "the same expert twice"),
    ],
)
def test_an_answer_that_cannot_be_right_is_refused(meta: dict[str, Any], words: str) -> None:
    with pytest.raises(ReplyRefused, match=words):
        read_experts(meta, ROUTERS, 3, num_tokens=4)


def test_tokens_after_a_stop_string_lose_their_experts_too() -> None:
    experts = ExpertChoices(ROUTERS.shape, np.tile(np.array([[[0, 1]] * 2], np.uint8), (9, 1, 1)))
    whole = Completion([1] * 6, [-1.0] * 6, (), "length", "", experts)
    cut = ended_at(whole, 4)
    assert cut.experts is not None
    assert len(cut.experts.ids) == 9 - 2
    assert ended_at(whole, 6).experts is experts


def test_an_interrupted_completion_has_the_experts_of_its_last_part() -> None:
    experts = ExpertChoices(ROUTERS.shape, np.tile(np.array([[[0, 1]] * 2], np.uint8), (6, 1, 1)))
    sequence = Resumption(PROMPTS[1], 9)
    sequence.parts += [
        Completion([5, 6], [-1.0] * 2, (VersionRun(V0, 0, 2),), "abort", ""),
        Completion([7, 8, 3], [-1.0] * 3, (VersionRun(PolicyVersion(1), 0, 3),), "stop", "", experts),
    ]
    assert sequence.joined("").experts is experts


def test_the_routers_of_a_model_are_read_from_its_config() -> None:
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 6, "num_experts": 4, "num_experts_per_tok": 2}
    assert routers_of(config) == Routers((0, 1, 2, 3, 4, 5), 4, 2)
    assert routers_of({**config, "decoder_sparse_step": 2, "mlp_only_layers": [3]}) == Routers((1, 5), 4, 2)
    assert routers_of({**config, "model_type": "mixtral"}) is None
    assert routers_of({**config, "num_experts": 0}) is None
    with pytest.raises(ValueError, match="num_experts = 'many'"):
        routers_of({**config, "num_experts": "many"})


async def test_groups_of_a_worker_have_the_experts_of_their_tokens(tmp_path: Path) -> None:
    """Those that transformers' routers choose; a model with other routers than the trainer's is refused before anything is sent."""
    build_model(tmp_path / "model", "qwen3_moe", **MIXTURE)
    with embedded_engine(tmp_path / "model", tmp_path, "--weight-version", "0") as engine:
        client = SglangClient(engine.url)
        client.limits = ModelLimits.of(tmp_path / "model")
        await client.load_weights(tmp_path / "model", V0)
        sampling = Sampling(max_new_tokens=40, stop_token_ids=(3,), routers=ROUTERS.shape)
        task = make_task("e0.p0.a0", prompt_ids=PROMPTS[0], group_size=3).model_copy(update={"sampling": sampling})
        (rows,) = await SINGLE_TURN.rollout([task], client)
        for row in rows:
            assert row.experts is not None
            expected = chosen_by_transformers(tmp_path / "model", row.token_ids[:-1].tolist())
            np.testing.assert_array_equal(row.experts.ids, expected)

        other = sampling.model_copy(update={"routers": RouterShape(num_layers=2, num_experts=4, top_k=2)})
        with pytest.raises(TaskRefused, match=r"wants the choices of 2 of 4 experts .* has 2 of 8 experts in 2 layers"):
            await client.generate(PROMPTS, other, 1)
        await client.close()
