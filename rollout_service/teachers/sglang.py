"""A teacher behind SGLang's ``/generate``, which the embedded engine answers too: nothing is generated, a prompt is scored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.rollout_service.engines.completion import shorten
from penstock.rollout_service.engines.engine_http import EngineHttp
from penstock.rollout_service.errors import ReplyRefused
from penstock.rollout_service.teachers.teacher import Answer, Question, TeacherKind

_SCORE_ONLY = {"max_new_tokens": 0, "temperature": 1.0}


class SglangTeacher:
    def __init__(self, url: str, *, api_key: str = "") -> None:
        self.url = url
        self._http = EngineHttp(url, api_key=api_key)

    async def model(self, deadline_s: float) -> str:
        """Return ``served_model_name``, or the model's path."""
        info = await self._http.call("GET", "/model_info", None, deadline_s)
        name = (info.get("served_model_name") or info.get("model_path")) if isinstance(info, dict) else None
        if not isinstance(name, str) or not name:
            raise ReplyRefused(f"{self.url}/model_info names no model: {shorten(info)}")
        return name

    async def encode(self, text: str, deadline_s: float) -> list[int]:
        body = {"text": text, "sampling_params": _SCORE_ONLY, "return_logprob": True, "logprob_start_len": 0}
        reply = await self._http.call("POST", "/generate", body, deadline_s)
        try:
            return [int(token) for _, token, *_ in reply["meta_info"]["input_token_logprobs"]]
        except (KeyError, TypeError, ValueError) as err:
            raise ReplyRefused(
                f"{self.url}: tokens of a text do not have SGLang's form ({err}): {shorten(reply)}"
            ) from None

    async def score(self, questions: Sequence[Question], top_k: int, deadline_s: float) -> list[Answer]:
        start = min(question.first for question in questions) - 1  # this token itself gets no log-probability
        body: dict[str, Any] = {
            "input_ids": [list(question.token_ids) for question in questions],
            "sampling_params": _SCORE_ONLY,
            "return_logprob": True,
            "logprob_start_len": start,
        }
        if top_k:
            body["top_logprobs_num"] = top_k
        replies = await self._http.call("POST", "/generate", body, deadline_s)
        if not isinstance(replies, list) or len(replies) != len(questions):
            got = f"{len(replies)} rows" if isinstance(replies, list) else type(replies).__name__
            raise ReplyRefused(f"{self.url}: expected {len(questions)} scored rows, got {got}")
        return [read_answer(self.url, *pair, start, top_k) for pair in zip(questions, replies, strict=True)]

    async def close(self) -> None:
        await self._http.close()


def read_answer(url: str, question: Question, reply: Any, start: int, top_k: int) -> Answer:
    try:
        meta = reply["meta_info"]
        version = str(meta["weight_version"])
        triples = meta["input_token_logprobs"]
        echoed = [triple[1] for triple in triples]
        skipped = question.first - start  # tokens that were not asked about; the first has no value
        logprobs = np.array([triple[0] for triple in triples[skipped:]], dtype=np.float32)
        places = meta["input_top_logprobs"][skipped:] if top_k else [[] for _ in logprobs]
        tops = [[(float(pair[0]), int(pair[1])) for pair in place] for place in places]
    except (KeyError, TypeError, IndexError, ValueError, AttributeError) as err:
        raise ReplyRefused(
            f"{url}: a scored row does not have SGLang's form ({type(err).__name__}: {err}): {shorten(reply)}"
        ) from None
    if echoed != list(question.token_ids[start:]):
        raise ReplyRefused(f"{url}: scored other tokens than those that were sent: {shorten(echoed)}")
    if not np.isfinite(logprobs).all():
        raise ReplyRefused(f"{url}: a log-probability is not a finite number: {shorten(logprobs.tolist())}")
    if len(tops) != len(logprobs) or any(len(place) != top_k for place in tops):
        raise ReplyRefused(f"{url}: expected {top_k} likeliest tokens for each of {len(logprobs)}, got {shorten(tops)}")
    pairs = np.array(tops, dtype=np.float64).reshape(len(logprobs), top_k, 2)
    return Answer(logprobs, pairs[..., 1].astype(np.int32), pairs[..., 0].astype(np.float32), version)


SGLANG = TeacherKind("sglang", SglangTeacher)
