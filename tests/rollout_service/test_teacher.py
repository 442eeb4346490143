"""A worker asks a teacher about its groups: exact numbers from a real engine, retries, other vocabularies refused."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.deploy.quickstart_task import write_model
from penstock.protocol.config.shared_sections import TeacherSettings
from penstock.protocol.errors import ConfigError
from penstock.protocol.trajectory import Group
from penstock.rollout_service.errors import (
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
    ReplyRefused,
    TeacherFailed,
    TeacherUnfit,
)
from penstock.rollout_service.teachers.sglang import read_answer
from penstock.rollout_service.teachers.teacher import Answer, Question, Teacher, vocabulary_probe
from tests.contracts.engine_under_test import EngineUnderTest, embedded_engine
from tests.contracts.tiny_model import Dense, build_model, write_tokenizer
from tests.groups import make_task
from tests.rollout_service.trainer_side import WorkerRun
from tests.servers import wait_for
from tests.trainer.groups.stored_groups import invent_group

TOP_K = 4


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineUnderTest]:
    scratch = tmp_path_factory.mktemp("teacher")
    build_model(scratch / "model")
    with embedded_engine(scratch / "model", scratch, "--weight-version", "7") as engine:
        yield engine


def teacher_at(url: str, **settings: Any) -> Teacher:
    found = Teacher.of(TeacherSettings(url=url, **settings))
    assert found is not None
    return found


async def scored(teacher: Teacher, groups: Sequence[Group], top_ks: Sequence[int | None]) -> list[Group]:
    try:
        return await teacher.score(groups, top_ks)
    finally:
        await teacher.close()


async def checked(teacher: Teacher, folder: Path, *, start_deadline_s: float = 30.0) -> None:
    try:
        await teacher.check(folder, start_deadline_s=start_deadline_s)
    finally:
        await teacher.close()


def with_gap(group: Group) -> Group:
    """Return a group of whose first trajectory only the second and the last sampled token are the policy's."""
    first = group.trajectories[0]
    mask = first.loss_mask.copy()
    sampled = np.flatnonzero(mask)
    keep = [int(sampled[1]), int(sampled[-1])]
    mask[:] = False
    mask[keep] = True
    version = first.version_runs[0].version
    runs = tuple(type(first.version_runs[0])(version, at, at + 1) for at in keep)
    changed = replace(
        first, loss_mask=mask, behaviour_logprobs=np.where(mask, first.behaviour_logprobs, 0.0), version_runs=runs
    )
    return replace(group, trajectories=(changed, *group.trajectories[1:]))


def test_an_engine_that_serves_the_teacher_gives_its_exact_log_probabilities(engine: EngineUnderTest) -> None:
    """Of every sampled token, and of its likeliest ones there, as transformers computes them; with its identity."""
    groups = [invent_group(f"e0.p{n}.a0", version=1, size=3, seed=n) for n in range(3)]
    groups[1] = with_gap(groups[1])
    found = asyncio.run(scored(teacher_at(engine.url), groups, [TOP_K, 0, None]))
    dense = Dense(engine.model)
    assert found[2] is groups[2]
    for group, top_k in zip(found[:2], (TOP_K, 0), strict=True):
        assert group.teacher is not None
        assert group.teacher.model.endswith("@7")
        for row, said in zip(group.trajectories, group.teacher.rows, strict=True):
            table = dense.logprobs(row.token_ids.tolist())
            places = np.flatnonzero(row.loss_mask)
            expected = [float(table[at - 1, int(row.token_ids[at])]) for at in places]
            assert said.logprobs.tolist() == pytest.approx(expected, abs=1e-5)
            assert said.top_logprobs.shape == (len(places), top_k)
            if top_k:
                tops = table[places - 1].topk(top_k)
                assert said.top_logprobs == pytest.approx(tops.values.numpy(), abs=1e-5)
                assert (said.top_ids == tops.indices.numpy()).all()


def test_a_teacher_of_another_vocabulary_is_refused(engine: EngineUnderTest, tmp_path: Path) -> None:
    """Both tokenizers encode a text of the policy's whole vocabulary; the error shows where they part."""
    asyncio.run(checked(teacher_at(engine.url), engine.model))
    other = tmp_path / "model"
    other.mkdir()
    document = json.loads((engine.model / "tokenizer.json").read_bytes())
    vocabulary = document["model"]["vocab"]
    some = [name for name, number in vocabulary.items() if 20 <= number < 40]
    document["model"]["vocab"] |= dict(zip(some, [vocabulary[name] for name in reversed(some)], strict=True))
    (other / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(TeacherUnfit, match=r"has another vocabulary than the policy: a text is \d+ tokens"):
        asyncio.run(checked(teacher_at(engine.url), other))
    with pytest.raises(TeacherUnfit, match=r"has no tokenizer\.json"):
        vocabulary_probe(tmp_path)


def test_a_teacher_that_does_not_start_is_named(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(TeacherFailed, match=rf"the teacher at {url} did not answer within 0\.2 s .*teacher\.url"):
            asyncio.run(checked(teacher_at(url), tmp_path, start_deadline_s=0.2))


class _Failing:
    """A teacher that fails in given ways, one after another, and then answers."""

    def __init__(self, *failures: Exception, version: str = "3", logprob: float = -1.0) -> None:
        self.url = "http://teacher:1"
        self.failures = list(failures)
        self.num_asked = 0
        self._version, self._logprob = version, logprob

    async def model(self, deadline_s: float) -> str:
        return "t"

    async def encode(self, text: str, deadline_s: float) -> list[int]:
        return []

    async def score(self, questions: Sequence[Question], top_k: int, deadline_s: float) -> list[Answer]:
        self.num_asked += 1
        if self.failures:
            raise self.failures.pop(0)
        answers = []
        for number, question in enumerate(questions):
            size = len(question.token_ids) - question.first
            version = f"{self._version}{number}" if self._version == "changing" else self._version
            tops = np.empty((size, 0), np.int32), np.empty((size, 0), np.float32)
            answers.append(Answer(np.full(size, self._logprob, np.float32), *tops, version))
        return answers

    async def close(self) -> None:
        return None


GROUP = invent_group("e0.p5.a0", version=1, size=2, seed=5)


def ask(client: _Failing, *, attempts: int = 3) -> Group:
    teacher = Teacher([client], deadline_s=1.0, attempts=attempts, max_requests=1)
    return asyncio.run(scored(teacher, [GROUP], [0]))[0]


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.rollout_service.teachers.teacher._FIRST_WAIT_S", 0.01)


def test_what_may_pass_is_asked_again() -> None:
    """A timeout, a broken connection, an error of the server and one that is busy; then the answer counts."""
    client = _Failing(EngineTimeout("late"), EngineUnreachable("gone"), EngineRefused("oops", status=503))
    found = ask(client, attempts=4)
    assert client.num_asked == 4
    assert found.teacher is not None
    assert found.teacher.model == "http://teacher:1@3"


@pytest.mark.parametrize(
    ("client", "num_asked", "words"),
    [
        (_Failing(*map(EngineTimeout, "123456789")), 3, "the teacher at http://teacher:1 .* in 3 of 3 .*3"),
        (_Failing(EngineRefused("too long", status=400)), 1, ".* in 1 of 3 attempts"),
        (_Failing(ReplyRefused("nonsense")), 1, ".* in 1 of 3 attempts"),
        (_Failing(version="changing"), 1, "the teacher .* answered with the versions changing0, changing1"),
        (_Failing(logprob=5.0), 1, "the answer of the teacher .* cannot be used: .* above 0"),
    ],
)
def test_what_cannot_pass_or_goes_on_ends_the_attempt_with_the_group(
    client: _Failing, num_asked: int, words: str
) -> None:
    with pytest.raises(TeacherFailed, match=rf"group e0\.p5\.a0: {words}"):
        ask(client)
    assert client.num_asked == num_asked


_REPLY: dict[str, Any] = {
    "meta_info": {
        "weight_version": "0",
        "input_token_logprobs": [[None, 5, None], [-1.0, 6, None], [-2.0, 7, None]],
        "input_top_logprobs": [None, [[-0.5, 9, None]], [[-0.7, 8, None]]],
    }
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_token_logprobs": [[None, 5, None], [-1.0, 6, None], [-2.0, 1, None]]}, "scored other tokens"),
        ({"input_token_logprobs": [[None, 5, None], [None, 6, None], [-2.0, 7, None]]}, "not a finite number"),
        ({"input_token_logprobs": None}, "does not have SGLang's form"),
        ({"weight_version": None, "input_top_logprobs": [None, [], []]}, "expected 1 likeliest tokens"),
        ({"input_top_logprobs": None}, "does not have SGLang's form"),
    ],
)
def test_a_reply_that_contradicts_the_question_is_refused(change: dict[str, Any], words: str) -> None:
    question = Question([4, 5, 6, 7], 2)
    assert read_answer("u", question, _REPLY, 1, 1).logprobs.tolist() == [-1.0, -2.0]
    with pytest.raises(ReplyRefused, match=f"http://t: .*{words}"):
        read_answer("http://t", question, {"meta_info": _REPLY["meta_info"] | change}, 1, 1)


@pytest.mark.slow
def test_a_worker_stores_what_its_teacher_says(run: WorkerRun, tmp_path: Path) -> None:
    """Of groups whose tasks ask for it; without its teacher the pack is dead-lettered, with group and URL."""
    write_model(tmp_path / "teacher", seed=9)
    run.publish(0)
    asked, plain = (make_task(f"e0.p{n}.a0", prompt_ids=[5, 6, 7 + n], group_size=2) for n in range(2))
    asked = asked.model_copy(update={"teacher_top_k": 3})
    with embedded_engine(tmp_path / "teacher", tmp_path, "--weight-version", "7") as engine:
        run.start("w0", f"teacher.url={engine.url}", "teacher.attempts=1", "worker.task_attempts=1")
        run.issue("first", [asked, plain])
        found, other = run.collect_groups(1)
    assert other.teacher is None
    assert found.teacher is not None
    assert [row.top_ids.shape[1] for row in found.teacher.rows] == [3, 3]
    table = Dense(tmp_path / "teacher").logprobs(found.trajectories[0].token_ids.tolist())
    tops = table[found.num_prompt_tokens - 1 : -1].topk(3)
    assert (found.teacher.rows[0].top_ids == tops.indices.numpy()).all()
    run.issue("second", [asked.model_copy(update={"group_id": "e0.p2.a0"})])
    wait_for(lambda: bool(run.dead), "the pack to be dead-lettered")
    assert run.dead[0].reason == "TeacherFailed"
    assert f"group e0.p2.a0: the teacher at {engine.url} gave no log-probabilities" in run.dead[0].detail


def test_a_worker_without_a_teacher_refuses_a_task_that_needs_one(run: WorkerRun) -> None:
    run.publish(0)
    run.attach()
    one, other = (make_task(f"e0.p{n}.a0", prompt_ids=[5, 6], group_size=2) for n in range(2))
    run.issue("first", [one.model_copy(update={"teacher_top_k": 0}), other])
    assert [group.group_id for group in run.collect_groups(1)] == ["e0.p1.a0"]
    wait_for(lambda: bool(run.dead), "the task to be dead-lettered")
    assert run.dead[0].reason == "no_teacher"
    assert "e0.p0.a0 needs a teacher's log-probabilities" in run.dead[0].detail


def test_a_kind_of_teacher_of_your_own_is_named_by_its_file(tmp_path: Path) -> None:
    """It makes the client of each URL; a name that is none is refused with the known ones."""
    file = tmp_path / "my_teacher.py"
    file.write_text(
        "from penstock.rollout_service.teachers.teacher import TeacherKind\n"
        "from penstock.rollout_service.teachers.sglang import SglangTeacher\n"
        "class Mine(SglangTeacher):\n"
        "    pass\n"
        "kind = TeacherKind('mine', Mine)\n"
    )
    found = teacher_at("http://a:1, http://b:2", kind=f"{file}:kind")
    assert [(type(client).__name__, client.url) for client in found._clients] == [
        ("Mine", "http://a:1"),
        ("Mine", "http://b:2"),
    ]
    with pytest.raises(ConfigError, match=r"unknown teacher 'sgland'; did you mean 'sglang'\?"):
        teacher_at("http://a:1", kind="sgland")
