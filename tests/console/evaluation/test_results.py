"""Evaluations: estimates as enumerations have them, and results that a killed evaluation continues from."""

from __future__ import annotations

import io
import itertools
import math
from pathlib import Path

import pytest
from rich.console import Console

from penstock.console import evaluation_results
from penstock.console.evaluation_results import (
    ALL,
    Answers,
    Correctness,
    Estimate,
    EvaluationResult,
    Outcome,
    estimate,
    majority,
    pass_at_k,
    powers_of_two,
    summarise,
)
from penstock.console.report import plots

VOTES = Answers("the whole completion", lambda _: str.strip)


@pytest.mark.parametrize("num_samples", range(1, 7))
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(num_samples: int) -> None:
    for num_correct, k in itertools.product(range(num_samples + 1), range(1, num_samples + 1)):
        subsets = list(itertools.combinations(range(num_samples), k))
        share = sum(any(i < num_correct for i in subset) for subset in subsets) / len(subsets)
        assert pass_at_k(num_samples, num_correct, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_is_defined_for_k_up_to_the_number_of_samples_only() -> None:
    """More samples than were drawn, none, or more correct ones than samples are refused."""
    for arguments in ((4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)):
        with pytest.raises(ValueError, match="not defined"):
            pass_at_k(*arguments)


def test_the_estimator_is_unbiased() -> None:
    """Its mean over all draws of n samples with chance p is 1 - (1 - p)^k."""
    p, n, k = 0.3, 5, 3
    mean = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
    assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


def test_the_majority_is_the_most_frequent_answer() -> None:
    """Frequent and right 1, frequent and wrong 0; a sample without an answer has no vote."""
    assert majority(["7", "7", "8"], [True, True, False]) == 1.0
    assert majority(["7", "8", "8"], [True, False, False]) == 0.0
    assert majority(["7", None, None], [True, False, False]) == 1.0
    assert majority([None, None], [False, False]) == 0.0


def test_a_tie_is_the_mean_of_its_answers() -> None:
    """As if it were broken at random; equal answers that were scored differently count with their share."""
    assert majority(["7", "8"], [True, False]) == 0.5
    assert majority(["a", "b", "c"], [False, True, False]) == pytest.approx(1 / 3)
    assert majority(["7", "7", "8"], [True, False, False]) == 0.5


def test_a_share_has_wilsons_interval() -> None:
    """81 of 263 is the example of Newcombe (1998): 0.2553 to 0.3662; none and all touch the bounds."""
    found = estimate([1.0] * 81 + [0.0] * 182, bounded=True)
    assert found.method == "wilson"
    assert (found.low, found.high) == (pytest.approx(0.2553, abs=5e-5), pytest.approx(0.3662, abs=5e-5))
    assert estimate([0.0] * 20, bounded=True) == Estimate(0.0, 0.0, pytest.approx(0.1611, abs=5e-5), "wilson", 20)
    assert estimate([1.0], bounded=True).high == 1.0


def test_a_mean_has_the_interval_of_its_prompts() -> None:
    """1.96 standard errors of the prompts' own means, cut off where the value is bounded; one prompt has none."""
    found = estimate([0.0, 0.5, 1.0, 0.5], bounded=True)
    error = math.sqrt((0.25 + 0.25) / 3 / 4)
    assert (found.value, found.method) == (0.5, "normal")
    assert found.low == pytest.approx(0.5 - 1.959964 * error, abs=1e-6)
    assert found.high == pytest.approx(0.5 + 1.959964 * error, abs=1e-6)
    assert estimate([0.75, 1.0], bounded=True).high == 1.0
    assert estimate([0.75, 1.0], bounded=False).high == pytest.approx(0.875 + 1.959964 * 0.125, abs=1e-6)
    assert estimate([0.25], bounded=True) == Estimate(0.25, None, None, "none", 1)
    with pytest.raises(ValueError, match="at least one"):
        estimate([], bounded=True)


def test_samples_of_a_prompt_narrow_no_interval() -> None:
    once = estimate([0.0, 1.0, 1.0, 0.0], bounded=True)
    tenfold = estimate([sum([value] * 10) / 10 for value in (0.0, 1.0, 1.0, 0.0)], bounded=True)
    assert once == tenfold


def test_pass_at_k_is_reported_for_powers_of_two_and_all_samples() -> None:
    assert powers_of_two(1) == [1]
    assert powers_of_two(8) == [1, 2, 4, 8]
    assert powers_of_two(6) == [1, 2, 4, 6]


def outcome(prompt: int, source: str, *right: bool, texts: tuple[str, ...] = ()) -> Outcome:
    return Outcome(
        prompt=prompt, source=source, reward="r", rewards=tuple(map(float, right)),
        completions=texts or ("",) * len(right), completion_tokens=(3,) * len(right),
        finish_reasons=("stop",) * len(right),
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
