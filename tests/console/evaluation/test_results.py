"""Results of evaluations: per source, failures counted and never a 0, files that a killed evaluation continues from."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from penstock.console import evaluation_results
from penstock.console.evaluation_results import ALL, Answers, Correctness, EvaluationResult, Outcome, summarise
from penstock.console.report import plots

VOTES = Answers("the whole completion", lambda _: str.strip)


def outcome(prompt: int, source: str, *right: bool, texts: tuple[str, ...] = ()) -> Outcome:
    return Outcome(
        prompt=prompt, source=source, reward="r", rewards=tuple(float(one) for one in right), completions=texts or ("",) * len(right),
        completion_tokens=(3,) * len(right), finish_reasons=("stop",) * len(right),
    )  # fmt: skip


def failed(prompt: int, source: str, reason: str) -> Outcome:
    return Outcome(prompt=prompt, source=source, failed=reason)


def correct(*outcomes: Outcome) -> Correctness:
    return Correctness("r ≥ 1", {one.prompt: tuple(r >= 1 for r in one.rewards) for one in outcomes})


def test_every_source_has_its_own_estimates_and_all_have_one() -> None:
    """avg@2, pass@1, pass@2 and maj@2 of each source, and over all prompts together."""
    a = outcome(0, "aime", True, False, texts=("7", "8"))
    b = outcome(1, "math", True, True, texts=("1", "1"))
    c = outcome(2, "math", False, False, texts=("2", "3"))
    aime, math_, both = summarise([a, b, c], {"aime": 1, "math": 2}, k=2, correct=correct(a, b, c), answers=VOTES)
    assert both.source == ALL
    assert [one.accuracy and one.accuracy.value for one in (aime, math_, both)] == [0.5, 0.5, 0.5]
    assert {k: one.value for k, one in both.pass_at.items()} == {1: 0.5, 2: pytest.approx(2 / 3)}
    assert [one.maj and one.maj.value for one in (aime, math_, both)] == [0.5, 0.5, 0.5]
    assert both.accuracy is not None
    assert both.accuracy.num_prompts == 3
    assert (both.completion_tokens_mean, both.truncated_share) == (3.0, 0.0)


def test_a_failed_prompt_is_counted_and_enters_no_mean() -> None:
    a = outcome(0, "s", True)
    (found,) = summarise([a, failed(1, "s", "scoring: Timeout")], {"s": 3}, k=1, correct=correct(a), answers=VOTES)
    assert (found.complete, found.failed, found.missing, found.prompts) == (1, 1, 1, 3)
    assert found.reasons == {"scoring: Timeout": 1}
    assert found.accuracy is not None
    assert (found.accuracy.value, found.accuracy.num_prompts) == (1.0, 1)
    assert found.reward is not None
    assert found.reward.value == 1.0


def test_without_a_complete_prompt_there_is_no_estimate() -> None:
    (found,) = summarise([failed(0, "s", "x")], {"s": 1}, k=2, correct=Correctness("", {}), answers=VOTES)
    assert (found.reward, found.accuracy, found.pass_at, found.maj) == (None, None, {}, None)


def test_without_a_rule_of_success_only_the_reward_has_a_mean() -> None:
    a = outcome(0, "s", True, False)
    (found,) = summarise([a], {"s": 1}, k=2, correct=Correctness("not defined", None), answers=VOTES)
    assert found.reward is not None
    assert found.reward.value == 0.5
    assert (found.accuracy, found.pass_at, found.maj) == (None, {}, None)


def test_a_line_that_was_cut_off_is_sampled_again(tmp_path: Path) -> None:
    """Every whole line is kept, the last one of a prompt counts."""
    evaluation_results.append_outcomes(tmp_path, [failed(0, "s", "x"), outcome(1, "s", True)])
    evaluation_results.append_outcomes(tmp_path, [outcome(0, "s", True)])
    with (tmp_path / evaluation_results.GROUPS).open("a") as file:
        file.write('{"prompt": 2, "sou')
    found = evaluation_results.read_outcomes(tmp_path)
    assert sorted(found) == [0, 1]
    assert found[0].failed is None
    evaluation_results.rewrite_outcomes(tmp_path, found.values())
    assert evaluation_results.read_outcomes(tmp_path) == found


def test_a_result_is_read_back_shown_and_drawn(tmp_path: Path) -> None:
    """The stored file is the result; table and notes say what is incomplete."""
    a, b = outcome(0, "aime", True, False, texts=("1", "2")), outcome(1, "math", True, True, texts=("1", "1"))
    sources = summarise([a, b], {"aime": 2, "math": 1}, k=2, correct=correct(a, b), answers=VOTES)
    result = EvaluationResult(evaluation_id="v3-0", model="run@3", run="run", version=3, k=2, sources=sources,
                              success="r ≥ 1", answer=VOTES.rule, finished_at=1.0)  # fmt: skip
    folder = tmp_path / evaluation_results.FOLDER / "v3-0"
    folder.mkdir(parents=True)
    evaluation_results.write_result(folder, result)
    assert list(evaluation_results.results_of(tmp_path)) == [result]
    assert not result.is_complete
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(evaluation_results.result_table(result))
    shown = console.export_text()
    assert "1 of 2" in shown
    assert "pass@2" in shown
    assert "maj@2" in shown
    assert next(evaluation_results.result_notes(result)).startswith("2 of 3 prompts are complete, 0 failed, 1 missing")
    plots.draw_result(folder / evaluation_results.PLOT, result)
    assert (folder / evaluation_results.PLOT).read_bytes().startswith(b"\x89PNG")
