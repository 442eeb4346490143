"""Losses, estimators, filters and corrections from user code: chosen by file or import path, checked, recorded."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.trainer.groups.test_batcher import Box, ready

from penstock.forensics.replay.replay_findings import Verdict, describe
from penstock.protocol.config.run_file import Loaded, config_document, format_config, load
from penstock.protocol.errors import ConfigError
from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.algorithm.batch import MicroBatch
from penstock.trainer.algorithm.credit import Scored, credit_rule
from penstock.trainer.algorithm.group_filters.interface import RESERVED_REASONS, group_filter
from penstock.trainer.algorithm.objective import build_objective
from penstock.trainer.groups.batcher import group_rules
from penstock.trainer.groups.group_totals import DropReason
from penstock.trainer.learner.step_plan import ReadyGroup
from penstock.trainer.recovery.resume_checks import read_settings
from penstock.trainer.recovery.run_record_writer import differences, environment_fingerprint
from penstock.trainer.settings import TrainerSettings

PARTS = '''
import torch
from pydantic import Field
from penstock.trainer.algorithm.corrections.interface import Drift, correction
from penstock.trainer.algorithm.corrections.interface import Options as Base
from penstock.trainer.algorithm.estimators.interface import Outcomes, advantage_estimator
from penstock.trainer.algorithm.filters.interface import Candidate, trajectory_filter
from penstock.trainer.algorithm.group_filters.interface import GroupCandidate, group_filter
from penstock.trainer.algorithm.losses.interface import ClipRange, LossTerms, Tokens, none_of, policy_loss

class TiltedOptions(ClipRange):
    tilt: float = Field(default=0.5, gt=0.0, description="Exponent of the ratio.")

class KeepOptions(Base):
    keep_below: float = Field(default=0.0, description="Tokens whose log-ratio is below this are kept.")

class Contradicting(Base):
    clip_low: float = Field(default=0.7, description="Another thing of the same name.")

@policy_loss(options=TiltedOptions, source="mine")
def tilted(tokens: Tokens, *, clip_low: float, clip_high: float, tilt: float) -> LossTerms:
    ratio = tokens.log_ratio.exp().clamp(1 - clip_low, 1 + clip_high)
    return LossTerms(-tokens.advantages * ratio**tilt, ratio.detach(), none_of(ratio), none_of(ratio))

@policy_loss(options=Contradicting, source="mine")
def contradicting(tokens: Tokens, *, clip_low: float) -> LossTerms:
    raise AssertionError

@advantage_estimator(source="mine")
def halved(outcomes: Outcomes) -> torch.Tensor:
    return outcomes.rewards / 2

@trajectory_filter(source="mine", reason="easy")
def easy(candidate: Candidate) -> bool:
    return candidate.reward == 1.0

class SpreadOptions(Base):
    least_spread: float = Field(default=0.5, description="Groups whose rewards differ by less are dropped.")

@group_filter(options=SpreadOptions, source="mine", reason="small_spread")
def spread(group: GroupCandidate, *, least_spread: float) -> bool:
    return max(group.rewards) - min(group.rewards) < least_spread

@group_filter(source="mine", reason="never_counted")
def failing(group: GroupCandidate) -> bool:
    return group.row.data_source.missing

@correction(options=KeepOptions, source="mine")
def below(drift: Drift, *, keep_below: float) -> torch.Tensor:
    return drift.to_behaviour < keep_below
'''  # fmt: skip


@pytest.fixture(params=["my_parts.py", "my_parts_module"])
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """User code in the working directory, named as a file and as a module."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{request.param.removesuffix('.py')}.py").write_text(PARTS)
    yield request.param
    sys.modules.pop("my_parts_module", None)


def settings(*overrides: str) -> Loaded[TrainerSettings]:
    return load(TrainerSettings, overrides=["model.path=model", *overrides])


def everything(code: str, *overrides: str) -> Loaded[TrainerSettings]:
    return settings(
        f"algorithm.loss={code}:tilted", f"algorithm.advantage={code}:halved", f'algorithm.filters=["{code}:easy"]',
        f'algorithm.corrections=["{code}:below"]', f'algorithm.group_filters=["{code}:spread"]', *overrides,
    )  # fmt: skip


def batch(size: int) -> MicroBatch:
    ones, number = torch.ones(size), torch.arange(size)
    return MicroBatch(number[None], number, number, -ones, ones, ones / size, number * 0, ones * 0, ones * 0, 1)


def test_user_code_computes_with_its_options(code: str) -> None:
    """The loss, the estimator, the filter and the correction are those of the file, and so are their options."""
    loaded = everything(code, "algorithm.options.tilt=2.0", "algorithm.clip_high=0.5", "algorithm.options.keep_below=1")
    chosen = loaded.settings.algorithm
    found = credit_rule(chosen, longest=9)([Scored([1.0, 0.5], [3, 3], [False, False])])
    assert found.advantages == [0.5, 0.25]
    assert found.skipped == {"easy": 1}
    logprobs = torch.tensor([-0.9, -0.2, 1.0]).requires_grad_()
    outcome = build_objective(chosen)(logprobs, batch(3))
    ratios = (logprobs + 1.0).exp().clamp(0.8, 1.5) ** 2
    assert float(outcome.loss.detach()) == pytest.approx(-float(ratios[:2].detach().sum()) / 3)
    assert outcome.sums["rejected_below"] == 1
    outcome.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0] != 0.0


def test_a_group_filter_of_a_users_file_drops_whole_groups_under_its_reason(code: str) -> None:
    """It sees the whole group, after the built-in ones; its groups are not issued again, and a failing one is named."""
    chosen = everything(
        code, "algorithm.options.least_spread=0.4", "algorithm.dynamic_sampling=true"
    ).settings.algorithm
    assert [(rule.name, rule.reason) for rule in group_rules(chosen)] == [
        ("equal_rewards", "no_signal"), (f"{code}:spread", "small_spread"),
    ]  # fmt: skip
    box = Box(groups_per_step=1, algorithm=chosen)
    drops = [box.offer(rewarded(number, rewards)) for number, rewards in enumerate([(1, 1), (1, 0.7), (1, 0.5)])]
    assert [drop and (drop.reason, drop.is_final) for drop in drops] == [
        ("no_signal", True), ("small_spread", True), None,
    ]  # fmt: skip
    assert box.groups.totals.counts_document()["dropped_groups"] == {"no_signal": 1, "small_spread": 1}
    bad = settings(f'algorithm.group_filters=["{code}:failing"]').settings.algorithm
    assert set(bad.extension_digests) == {f"extension group filter {code}:failing"}
    with pytest.raises(ConfigError, match=rf"group filter {code}:failing failed for group e0\.p9\.a0: AttributeError"):
        Box(algorithm=bad).offer(rewarded(9, (1, 0)))


def rewarded(number: int, rewards: tuple[float, float]) -> ReadyGroup:
    group = ready(number, 0)
    return dataclasses.replace(group, scored=group.scored.model_copy(update={"rewards": rewards}))


def test_a_group_filter_has_a_reason_of_its_own() -> None:
    """A reason that the trainer counts already, or that metrics could not show, is refused when the file is read."""
    assert set(DropReason) - RESERVED_REASONS == {DropReason.NO_SIGNAL}
    assert set(DropReason) >= RESERVED_REASONS
    for reason in ("dead", "Too short", ""):
        with pytest.raises(TypeError, match="choose another"):
            group_filter(source="mine", reason=reason)(lambda group: False)


def test_options_of_user_code_are_shown_recorded_and_read_back(code: str) -> None:
    """`config show` lists each with its origin; the document of the record gives the same settings."""
    loaded = everything(code, "algorithm.options.tilt=0.7")
    shown = format_config(loaded)
    assert [line.split("#")[1].strip() for line in shown.splitlines() if line.startswith("algorithm.options.")] == [
        "override",
        "default",
        "default",
    ]
    again, _ = read_settings(json.dumps(config_document(loaded)).encode(), where="here")
    assert again.algorithm == loaded.settings.algorithm


def test_settings_that_an_older_version_recorded_are_read_with_its_defaults() -> None:
    document = config_document(load(TrainerSettings, overrides=["model.path=m", "algorithm.name=reinforce"]))
    document["settings"]["algorithm"] |= {"dual_clip": 1.2, "stale_negative_weight": 0.5, "ess_level": "token"}
    settings, _ = read_settings(json.dumps(document).encode(), where="here")
    assert (settings.algorithm.dual_clip, settings.algorithm.stale_negative_weight) == (1.2, 0.5)
    with pytest.raises(ConfigError, match="dual_clip does nothing with"):
        load(TrainerSettings, overrides=["model.path=m", "algorithm.name=reinforce", "algorithm.dual_clip=1.2"])


def test_what_user_code_may_not_do_is_refused(code: str) -> None:
    """Another meaning for a key of [algorithm], unknown and wrong options or none, a part of another kind."""
    tilted = f"algorithm.loss={code}:tilted"
    for overrides, reply in (
        ([tilted, "algorithm.options.tlit=1.0"], "algorithm.options.tlit; did you mean algorithm.options.tilt?"),
        ([tilted, "algorithm.options.tilt='much'"], "algorithm.options.tilt: expected a valid number"),
        ([tilted, "algorithm.options.tilt=0.0"], "algorithm.options.tilt: expected greater than 0"),
        ([tilted, "algorithm.dual_clip=2.0"], "algorithm.dual_clip does nothing with algorithm.loss = "),
        ([f"algorithm.loss={code}:contradicting"], "option clip_low is declared otherwise than algorithm.clip_low"),
        (["algorithm.options.tilt=0.5"], "unknown key algorithm.options.tilt; known are none"),
        ([f"algorithm.loss={code}:halved"], "losses.interface.Loss, got Estimator"),
        ([f"algorithm.loss={code}:nothing"], "has no attribute 'nothing'"),
        (['algorithm.corrections=["veto"]'], "veto is turned on by algorithm.veto"),
        ([f'algorithm.filters=["{code}:easy"]', "algorithm.name=ppo"], "every token has its own"),
        ([f'algorithm.filters=["{code}:eazy"]'], "has no attribute 'eazy'"),
    ):
        with pytest.raises(ConfigError) as caught:
            settings(*overrides)
        assert reply in str(caught.value)


def test_two_corrections_of_one_name_are_refused(code: str, tmp_path: Path) -> None:
    (tmp_path / "others.py").write_text(PARTS)
    loaded = settings(f'algorithm.corrections=["{code}:below", "others.py:below"]')
    with pytest.raises(ValueError, match="two corrections are named 'below'"):
        build_objective(loaded.settings.algorithm)


def test_a_replay_reports_user_code_that_changed(code: str) -> None:
    """The digest of each part is in the fingerprint that the run's record holds; another one is a finding."""
    digests = everything(code).settings.algorithm.extension_digests
    assert set(digests) == {
        f"extension loss {code}:tilted", f"extension advantage estimator {code}:halved",
        f"extension trajectory filter {code}:easy", f"extension group filter {code}:spread",
        f"extension correction {code}:below",
    }  # fmt: skip
    now = environment_fingerprint(digests)
    assert differences(now, now) == []
    then = now | {f"extension loss {code}:tilted": "0" * 16}
    lines = differences(then, now)
    assert lines == [f"extension loss {code}:tilted: {'0' * 16} then, {digests[f'extension loss {code}:tilted']} now"]
    assert lines[0] in describe(Verdict("r", environment_differences=lines))
    assert AlgorithmSettings().extension_digests == {}


def test_a_record_from_before_rows_were_packed_names_the_order_of_its_sums() -> None:
    """Its versions differ by rounding, and its replay says what explains that; a record of now says nothing of it."""
    now = environment_fingerprint()
    then = {name: value for name, value in now.items() if name != "rows"}
    assert differences(then, now) == ["rows: padded then, packed, prefixes once now"]
    assert differences({}, now) == []
