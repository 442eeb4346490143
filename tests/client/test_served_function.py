"""A Python function served as a reward: by threads of this process, whatever its source and its signature."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from penstock.client.rewards import ServedFunction, reward_name, reward_of
from penstock.reward_service.errors import UserFileError

CELL = """
scale = 0.5

def helper(text):
    raise ValueError("cannot read " + repr(text))

def of_a_cell(completions, **columns):
    return [helper(text) if text == "bad" else scale for text in completions]
"""

Serve = Callable[[Any], Callable[..., list[Any]]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve a function until the end of the test; what is returned posts one group to it."""
    served: list[ServedFunction] = []

    def start(function: Any) -> Callable[..., list[Any]]:
        served.append(ServedFunction(reward_of(function), reward_name(function)))
        url = served[-1].url

        def post(*completions: str, **more: Any) -> list[Any]:
            group = {"group_id": "g1", "prompt": "p", "completions": list(completions), "ground_truth": "4", **more}
            body = {"request_id": "r1", "reward": "x", "groups": [group]}
            answer = httpx.post(url, json=body, timeout=60, trust_env=False)
            assert answer.status_code == 200, answer.text
            return answer.json()["results"][0]["scores"]

        return post

    yield start
    for one in served:
        one.close()
        one.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("reward-")]


def test_closures_of_each_form_are_called_in_this_process(serve: Serve) -> None:
    """TRL's and verl's signatures and an object are recognised; what a closure changes is changed here."""
    seen: list[str] = []

    def of_group(completions: list[str], ground_truth: list[str], **columns: Any) -> list[float]:
        seen.extend(completions)
        return [float(text == truth) for text, truth in zip(completions, ground_truth, strict=True)]

    async def of_one(
        data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None
    ) -> dict[str, float]:
        await asyncio.sleep(0)
        return {"score": float(solution_str == ground_truth), "length": len(solution_str)}

    class Judge:
        def setup(self) -> None:
            self.thread = threading.current_thread().name

        def __call__(self, completions: list[str], **columns: Any) -> list[float]:
            assert threading.current_thread().name == self.thread == "reward-calls"
            return [0.25 for _ in completions]

    assert [score["score"] for score in serve(of_group)("4", "5")] == [1.0, 0.0]
    assert seen == ["4", "5"]
    assert serve(of_one)("44")[0] == {"score": 0.0, "parts": {"length": 2.0}, "error": None}
    assert serve(Judge)("a")[0]["score"] == serve(Judge())("a")[0]["score"] == 0.25
    assert serve(functools.partial(of_group))("4")[0]["score"] == 1.0


def test_an_exception_is_an_error_with_its_traceback(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    """The score is null, never 0, and the error names the lines of the notebook's cell."""
    names: dict[str, Any] = {}
    exec(compile(CELL, "<ipython-input-3>", "exec"), names)
    post = serve(names["of_a_cell"])
    assert [score["score"] for score in post("a", "b")] == [0.5, 0.5]
    for score in post("a", "bad"):
        assert score["score"] is None
        assert score["error"].startswith("ValueError: cannot read 'bad' (<ipython-input-3>, line 5, in helper)\n")
        assert "<ipython-input-3>:8 of_a_cell" in score["error"]
        assert "<ipython-input-3>:5 helper" in score["error"]
        assert "user_function.py" not in score["error"]
    names["scale"] = 0.75
    assert post("a")[0]["score"] == 0.75
    assert "cannot read 'bad'" in capsys.readouterr().err


def test_calls_of_a_function_do_not_overlap(serve: Serve) -> None:
    """Requests at the same time are answered one after the other: a function need not be thread-safe."""
    running = [0, 0]

    def slow(completions: list[str], **columns: Any) -> list[float]:
        running[0] += 1
        running[1] = max(running)
        time.sleep(0.02)
        running[0] -= 1
        return [1.0 for _ in completions]

    post = serve(slow)
    threads = [threading.Thread(target=post, args=("a",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert running == [0, 1]


def test_what_is_no_reward_function_is_refused_before_it_is_served() -> None:
    """A wrong signature and a failing ``setup`` name the function; no thread is left."""

    class Broken:
        def setup(self) -> None:
            raise OSError("no judge here")

        def __call__(self, completions: list[str], **columns: Any) -> list[float]:
            return []

    with pytest.raises(UserFileError, match=r"f\(x\) is not a reward function"):
        reward_of(f)
    with pytest.raises(UserFileError, match="no judge here"):
        ServedFunction(reward_of(Broken()), "broken")
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("reward-")]


def f(x: str) -> float:
    return 0.0


def test_the_version_follows_the_source() -> None:
    """An edited function has another version, one that is defined again the same; without a source its code counts."""

    def version(body: str, name: str = "<ipython-input-9>") -> str:
        names: dict[str, Any] = {}
        exec(
            compile(f"def score(completions, **columns):\n    return [{body} for _ in completions]", name, "exec"),
            names,
        )
        return reward_of(names["score"]).version

    assert version("1.0") == version("1.0")
    assert version("1.0") != version("2.0")


def test_names_are_those_that_a_reward_may_have() -> None:
    assert reward_name(lambda completions: []) == "reward"
    assert reward_name(functools.partial(f)) == "f"
