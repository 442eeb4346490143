"""A real SGLang as the teacher, or as the remote reference: what a worker stores of it is what the trainer computes of that model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.protocol.config.shared_sections import TeacherSettings
from penstock.rollout_service.teachers.teacher import Teacher
from penstock.trainer.algorithm.batch import Row, build
from penstock.trainer.learner.logprobs import CompletionScorer
from tests.contracts.real_sglang import START_S, running_sglang
from tests.contracts.tiny_model import build_model
from tests.rollout_service.test_teacher import with_gap
from tests.trainer.groups.stored_groups import invent_group

pytestmark = [pytest.mark.slow, pytest.mark.sglang]

EXACT = 2e-5  # nats; float32 against float32, one of which has its keys and values in a cache
TOP_K = 8


async def test_the_trainer_computes_what_the_teacher_said(tmp_path: Path) -> None:
    """Of groups with several trajectories, one with tool output between its tokens; a KL to and from the same weights is 0."""
    model = tmp_path / "model"
    build_model(model, seed=3)
    groups = [invent_group(f"e0.p{n}.a0", version=1, size=3, seed=n) for n in range(3)]
    groups[1] = with_gap(groups[1])
    with running_sglang(model, tmp_path) as url:
        teacher = Teacher.of(TeacherSettings(url=url))
        assert teacher is not None
        try:
            await teacher.check(model, start_deadline_s=START_S)
            found = await teacher.score(groups, [TOP_K, TOP_K, TOP_K])
        finally:
            await teacher.close()
    scorer = CompletionScorer(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), 1.0)
    for group in found:
        assert group.teacher is not None
        assert group.teacher.model.endswith("@0")
        said = group.teacher.rows
        batch = build(
            [
                Row(trajectory.token_ids, trajectory.loss_mask, trajectory.behaviour_logprobs, 1.0, 0.1)
                for trajectory in group.trajectories
            ]
        )
        top = (
            torch.from_numpy(np.concatenate([row.top_ids for row in said])).long(),
            torch.from_numpy(np.concatenate([row.top_logprobs for row in said])),
        )
        with torch.no_grad():
            logprobs, kl = scorer(
                batch.input_ids,
                batch.predictors,
                batch.targets,
                position_ids=batch.position_ids,
                layout=batch.layout,
                kl_from=top,
            )
        assert np.concatenate([row.logprobs for row in said]) == pytest.approx(logprobs.numpy(), abs=EXACT)
        assert kl.numpy() == pytest.approx(0.0, abs=EXACT)
