"""A user's reward file in each supported style, and the errors of one that does not work."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.reward_service.endpoints.wire import GroupToScore, Score
from penstock.reward_service.errors import UserFileError
from penstock.reward_service.user_code import user_file

GROUP = GroupToScore(
    group_id="g",
    prompt="2 + 2",
    completions=["4", "five"],
    data_source="sums",
    ground_truth="4",
    extra_info={"level": 3},
)

VERL = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    "
TRL = "def f(prompts, completions, ground_truth, level, **kwargs):\n    "
RIGHT_WRONG = [Score(score=1.0), Score(score=0.0)]

GOOD = {
    "verl": (VERL + "return float(solution_str == ground_truth)", RIGHT_WRONG),
    "verl-int": (VERL + "return int(solution_str == ground_truth)", RIGHT_WRONG),
    "verl-bool": (VERL + "return solution_str == ground_truth", RIGHT_WRONG),
    "verl-numpy": ("import numpy\n" + VERL + "return numpy.float32(solution_str == ground_truth)", RIGHT_WRONG),
    "verl-async": (
        "import asyncio\nasync " + VERL + "await asyncio.sleep(0)\n    return float(solution_str == '4')",
        RIGHT_WRONG,
    ),
    "verl-two-parameters": (
        "def compute_score(solution_str, ground_truth):\n    return float(solution_str == ground_truth)",
        RIGHT_WRONG,
    ),
    "verl-parts": (
        VERL + "return {'score': 1, 'acc': solution_str == ground_truth, 'level': extra_info['level'], 'pred': 'x'}",
        [Score(score=1.0, parts={"acc": 1.0, "level": 3.0}), Score(score=1.0, parts={"acc": 0.0, "level": 3.0})],
    ),
    "trl": (TRL + "return [float(c == t) for c, t in zip(completions, ground_truth)]", RIGHT_WRONG),
    "trl-columns": (
        TRL
        + "assert prompts == ['2 + 2'] * 2 and level == [3, 3] and kwargs['data_source'] == ['sums'] * 2\n    return [1, 0]",
        RIGHT_WRONG,
    ),
    "trl-only-completions": (
        "def reward(completions):\n    return [float(c == '4') for c in completions]",
        RIGHT_WRONG,
    ),
    "trl-async": (
        "async def reward(completions, **kwargs):\n    return [float(c == '4') for c in completions]",
        RIGHT_WRONG,
    ),
    "class": (
        "class Judge:\n    def __init__(self):\n        self.wanted = '4'\n"
        "    def __call__(self, completions, **kwargs):\n        return [float(c == self.wanted) for c in completions]",
        RIGHT_WRONG,
    ),
    "instance": (
        "class Judge:\n    def __init__(self, wanted):\n        self.wanted = wanted\n"
        "    def __call__(self, data_source, solution_str, ground_truth, extra_info=None):\n"
        "        return float(solution_str == self.wanted)\njudge = Judge('4')",
        RIGHT_WRONG,
    ),
    "verl-batch": (
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    assert extra_infos == [{'level': 3}] * 2\n"
        "    return [float(s == t) for s, t in zip(solution_strs, ground_truths)]",
        RIGHT_WRONG,
    ),
    "openrlhf": (
        "import numpy\ndef reward_func(queries, prompts, labels):\n"
        "    right = numpy.array([float(q == p + l) for q, p, l in zip(queries, prompts, labels)])\n"
        "    return {'rewards': right, 'scores': right, 'extra_logs': {'long': [len(q) for q in queries]}}",
        [Score(score=1.0, parts={"long": 6.0, "scores": 1.0}), Score(score=0.0, parts={"long": 9.0, "scores": 0.0})],
    ),
    "openrlhf-list": (
        "def reward_func(queries, prompts, labels):\n    return [float(q.endswith('+ 24')) for q in queries]",
        RIGHT_WRONG,
    ),
    "helpers-beside-it": (
        "def _tidy(s): return s\ndef other(x): return x\n" + VERL + "return float(_tidy(solution_str) == '4')",
        RIGHT_WRONG,
    ),
}


def write(folder: Path, source: str) -> Path:
    file = folder / "my_file.py"
    file.write_text(source)
    return file


@pytest.mark.parametrize("style", GOOD)
async def test_every_function_style_is_called_by_its_own_signature(style: str, tmp_path: Path) -> None:
    """Verl functions, TRL functions and callable classes, sync or async, give one score for each completion."""
    source, expected = GOOD[style]
    assert await user_file.load(write(tmp_path, source)).score(GROUP) == expected


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            VERL + "raise KeyError('nope')",
            "KeyError: 'nope' (my_file.py, line 2, in compute_score: raise KeyError('nope'))",
        ),
        (VERL + "return None", "a score must be a number, NoneType"),
        (VERL + "return '1.0'", "a score must be a number, str"),
        (VERL + "return float('nan')", "a score must be finite"),
        (VERL + "return {'reward': 1}", "without 'score'"),
        (VERL + "import sys\n    sys.exit(3)", "SystemExit: 3"),
        (TRL + "return [1.0]", "must return a list of 2 scores"),
        (TRL + "return 1.0", "TypeError"),
        (TRL + "return {'score': 1}", "must return a list of 2 scores"),
        (TRL + "return [None, 1.0]", "a score must be a number, NoneType"),
        ("def f(solution_strs):\n    return [1.0]", "must return a list of 2 scores"),
        ("def f(queries, prompts, labels):\n    return {'scores': [1, 1]}", "without 'rewards'"),
        (
            "def f(queries, prompts, labels):\n    return {'rewards': [1, 1], 'extra_logs': {'n': [1]}}",
            "1 values of n for 2 completions",
        ),
        ("def f(completions, colour):\n    return [1, 1]", "colour"),
    ],
)
async def test_every_failure_is_an_error_of_the_score(source: str, text: str, tmp_path: Path) -> None:
    """An exception, None, NaN or a wrong count is an error that names the line; it is never a 0."""
    scores = await user_file.load(write(tmp_path, source)).score(GROUP)
    assert len(scores) == 2
    assert scores[0].score is None
    assert text in (scores[0].error or "")


async def test_one_failed_completion_keeps_the_other_scores(tmp_path: Path) -> None:
    scores = await user_file.load(write(tmp_path, TRL + "return [None, 0.5]")).score(GROUP)
    assert scores[0].error
    assert scores[1] == Score(score=0.5)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("x = 1", "no reward function"),
        ("def f(a, b): return 1", "no reward function"),
        ("def compute_score(a, b): return 1", "is not a reward function"),
        ("def f(completions): pass\ndef g(completions): pass", "several reward functions (f, g)"),
        ("def compute_score(solution_str, model): return 1", "needs model"),
        ("def f(completions, completion_ids): return 1", "needs completion_ids"),
        ("class J:\n  def __init__(self, x): pass\n  def __call__(self, completions): return []", "without arguments"),
        ("def compute_score(:", "SyntaxError"),
        ("\n\n1 / 0", "line 3: cannot be loaded: ZeroDivisionError"),
        ("import no_such_module_here", "ModuleNotFoundError"),
    ],
)
def test_a_file_that_cannot_work_is_refused_with_the_reason(source: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(UserFileError) as refused:
        user_file.load(write(tmp_path, source))
    assert text in str(refused.value)
    assert "my_file.py" in str(refused.value)


def test_a_missing_file_or_function_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserFileError, match="no such file"):
        user_file.load(tmp_path / "absent.py")
    with pytest.raises(UserFileError, match="no callable 'g'"):
        user_file.load(write(tmp_path, "def f(completions): pass"), "g")
    assert user_file.load(write(tmp_path, "def f(completions): pass\ndef g(completions): pass"), "g").name == "g"


async def test_an_object_is_set_up_once_and_closed(tmp_path: Path) -> None:
    """``setup`` runs before the first call and ``close`` at the end, async or not; a setup that raises is refused."""
    source = (
        "class Judge:\n    def setup(self):\n        self.seen = ['setup']\n"
        "    async def close(self):\n        self.seen.append('close')\n"
        "    def __call__(self, completions):\n        self.seen.append('call')\n        return [1.0] * len(completions)\n"
    )
    reward = user_file.load(write(tmp_path, source))
    await reward.open()
    assert await reward.score(GROUP) == [Score(score=1.0)] * 2
    await reward.close()
    assert reward.function.seen == ["setup", "call", "close"]  # type: ignore[attr-defined]
    broken = user_file.load(write(tmp_path, source.replace("self.seen = ['setup']", "raise OSError('no model')")))
    with pytest.raises(UserFileError, match=r"setup\(\) of Judge failed: OSError: no model"):
        await broken.open()


@pytest.mark.parametrize(
    ("source", "takes_messages"),
    [
        ("def f(completions, **_):\n    return [float(c[0]['content'] == '4') for c in completions]", True),
        (
            "def f(completions, **_):\n    return [float((lambda m: m.get('content'))(c[-1]) == '4') for c in completions]",
            True,
        ),
        (
            "def text(messages):\n    return messages[-1]['content']\n\n"
            "def f(completions, **_):\n    return [float(text(c) == '4') for c in completions]",
            True,
        ),
        (
            "class F:\n    def __call__(self, completions, **_):\n        return [float(c[0]['content'] == '4') for c in completions]",
            True,
        ),
        ("def f(completions, **_):\n    return [float(c == '4') for c in completions]", False),
        (
            "def f(completions, **_):\n    'content'\n    return [float(c == '4') for c in completions]\nf.conversational = False",
            False,
        ),
    ],
    ids=["a comprehension", "a lambda", "a function that it calls", "an object", "texts", "its own word"],
)
async def test_a_trl_function_gets_what_it_was_written_for(source: str, takes_messages: bool, tmp_path: Path) -> None:
    """Messages where its code reads the content of one, texts elsewhere; the same rule however it is loaded."""
    loaded = user_file.load(write(tmp_path, source))
    assert loaded.conversational is takes_messages
    assert await loaded.score(GROUP) == RIGHT_WRONG
    again = user_file.of(loaded.function, "f", loaded.file)
    assert again.conversational is takes_messages


async def test_a_column_that_the_row_lacks_is_named(tmp_path: Path) -> None:
    source = "def f(completions, answer, hint=None, *, unit):\n    return [1.0 for _ in completions]"
    scores = await user_file.load(write(tmp_path, source)).score(GROUP)
    assert {score.score for score in scores} == {None}
    assert scores[0].error is not None
    assert scores[0].error.startswith("f reads answer, unit, and the row has only completions, data_source,")
    assert scores[0].error.endswith("""In `penstock reward test`: --extra-info '{"answer": VALUE, "unit": VALUE}'""")


async def test_functions_for_conversations_get_messages(tmp_path: Path) -> None:
    """With --conversational a TRL function gets messages, as TRL's trainer passes for chat data."""
    source = (
        TRL + "assert prompts[0][0]['role'] == 'user'\n    return [float(c[0]['content'] == '4') for c in completions]"
    )
    assert await user_file.load(write(tmp_path, source), conversational=True).score(GROUP) == RIGHT_WRONG
    with pytest.raises(UserFileError, match="TRL-style"):
        user_file.load(write(tmp_path, VERL + "return 1"), conversational=True)


async def test_the_first_traceback_of_each_line_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await user_file.load(write(tmp_path, VERL + "return 1 / 0")).score(GROUP)
    assert capsys.readouterr().err.count("ZeroDivisionError: division by zero") == 1
