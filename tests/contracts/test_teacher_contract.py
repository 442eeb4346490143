"""Every server that speaks SGLang's API answers for a teacher: exact numbers, the same tokens of a text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
import torch
from tokenizers import Tokenizer

from penstock.rollout_service.teachers.sglang import SglangTeacher
from penstock.rollout_service.teachers.teacher import Question, Teacher, vocabulary_probe
from tests.contracts.engine_under_test import DEADLINE_S, EngineUnderTest
from tests.contracts.tiny_model import Dense

T = TypeVar("T")
TOLERANCE = 1e-5  # nats; float32 against float32
QUESTIONS = [Question([5, 17, 88, 250, 31, 9], 3), Question([5, 17, 88, 44], 3), Question([7] * 40, 1)]


def asked(engine: EngineUnderTest, question: Callable[[SglangTeacher], Awaitable[T]]) -> T:
    """Return what a client that is closed afterwards was told."""

    async def ask() -> T:
        client = SglangTeacher(engine.url)
        try:
            return await question(client)
        finally:
            await client.close()

    return asyncio.run(ask())


@pytest.mark.parametrize("top_k", [0, 4])
def test_the_scores_are_those_of_the_dense_forward(engine: EngineUnderTest, dense: Dense, top_k: int) -> None:
    """Of the rows' own tokens from the first that is asked about, and of the likeliest ones there, at one version."""
    for batch in (QUESTIONS, QUESTIONS[:1]):
        answers = asked(engine, lambda client, batch=batch: client.score(batch, top_k, DEADLINE_S))
        for question, answer in zip(batch, answers, strict=True):
            tokens = list(question.token_ids)
            table = dense.logprobs(tokens)[question.first - 1 : len(tokens) - 1]
            expected = table.gather(1, torch.tensor(tokens[question.first :]).unsqueeze(1)).squeeze(1)
            assert answer.logprobs.tolist() == pytest.approx(expected.tolist(), abs=TOLERANCE)
            assert answer.top_ids.tolist() == table.topk(top_k).indices.tolist()
            assert answer.top_logprobs == pytest.approx(table.topk(top_k).values.numpy(), abs=TOLERANCE)
            assert answer.version == "0"


def test_a_text_has_the_tokens_of_its_tokenizer(engine: EngineUnderTest) -> None:
    """Those of tokenizer.json, also of tokens from all over the vocabulary; so the check of vocabularies passes."""
    text, expected = vocabulary_probe(engine.model)
    assert expected == Tokenizer.from_file(str(engine.model / "tokenizer.json")).encode(text).ids
    assert asked(engine, lambda client: client.encode(text, DEADLINE_S)) == expected
    assert len(set(expected)) > 100
    assert asked(engine, lambda client: client.model(DEADLINE_S))
    teacher = Teacher([SglangTeacher(engine.url)], deadline_s=DEADLINE_S, attempts=1, max_requests=1)

    async def check() -> None:
        try:
            await teacher.check(engine.model, start_deadline_s=DEADLINE_S)
        finally:
            await teacher.close()

    asyncio.run(check())
    assert json.loads((engine.model / "config.json").read_text())["vocab_size"] >= max(expected)
