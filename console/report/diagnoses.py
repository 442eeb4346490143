"""Diagnose why a run does not learn: metrics of its steps in, sentences out; pure.

Each rule looks at the newest steps and names what it saw, the usual cause and the fix. The metrics are those of
`learning.read`, and ``reward_mean``. The reasons for which groups are dropped are explained by their values in events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from penstock.console.report.learning import Evaluation, held_out, known_mean, mean
from penstock.console.report.run_summary import Diagnosis

OF_A_FILTER = "left out by a group filter of the run file (algorithm.group_filters), or a reason of another build"
MEANINGS: dict[str, str] = {
    "stale": "older than rollout.max_staleness when it was its turn; its prompt is sampled again. Many: a worker "
    "or a reward is slow (penstock watch shows which), or raise rollout.max_staleness",
    "duplicate": "delivered a second time, and left out: NATS redelivers what a worker or service held when it was stopped or "
    "killed, or did not confirm in time. Harmless",
    "foreign": "not a group of this run's data: from a run of the same name with other data",
    "future": "sampled by a version that the trainer has not reached, or of a rolled-back session without a record of its step; its prompt "
    "is sampled again",
    "unreadable": "its object is missing, corrupt or not what the message says; check the object store: penstock audit RUN",
    "quarantined": "two services were killed while they processed its message",
    "dead": "given up by another service: penstock dead-letters RUN",
    "no_signal": "all its rewards were equal, and algorithm.dynamic_sampling sampled another group instead",
    "no_baseline": "issued before the algorithm was remax, without a greedy completion",
    "lost": "every queue was empty and it had not arrived; its prompt is sampled again",
    "superseded": "dropped by an earlier session, and its next attempt has arrived",
    "abandoned": "held-out: its evaluation failed, or ended with the trainer that started it",
}

REPEATS = (
    "more than once: NATS redelivers a task whose worker was stopped or killed, whose engine failed, or which was not "
    "confirmed within 9 s (a machine under load). The second result is dropped as duplicate: nothing is trained twice"
)
Figures = Mapping[str, float]
_RECENT = 20  # steps that the rules look at
_LEAST = 3  # steps before anything is said
_EDGE = 5  # steps at either end of a course
_FEW_SIGNALS, _MANY_DROPPED, _LOW_ENTROPY, _ENTROPY_SHARE, _HALF = 0.5, 0.2, 0.1, 0.1, 0.5
_ALL_CUT, _DRIFT, _FAR_GAP, _FAR_KL, _FEW_SAMPLES = 0.95, 1.5, 0.05, 0.1, 0.5
_LARGE_UPDATE, _OLD, _RUNAWAY, _AT_RANDOM = 0.1, 4.0, 0.3, 2.0
_NEARLY_ALL, _MANY_CUT = 0.9, 0.25


@dataclass(frozen=True, slots=True)
class RunMetrics:
    steps: Sequence[Figures]  # in order, those of the whole run
    issued: int = 0  # groups
    dropped: Mapping[str, int] = field(default_factory=dict)  # groups by reason
    evaluations: Sequence[Evaluation] = ()  # of the primary split, in order
    failing: str = ""  # why rewards fail now, and no step is made; empty: they do not

    @property
    def recent(self) -> Sequence[Figures]:
        return self.steps[-_RECENT:]

    def mean(self, name: str) -> float | None:
        return _mean(self.recent, name)

    def course(self, name: str) -> tuple[float, float] | None:
        """Return a figure's means over the first and the last of the newest steps; None for fewer than ten that have it."""
        values = [step[name] for step in self.recent if name in step]
        return (mean(values[:_EDGE]), mean(values[-_EDGE:])) if len(values) >= 2 * _EDGE else None


def diagnose(run: RunMetrics) -> tuple[Diagnosis, ...]:
    """Return what is wrong with a run's learning, the gravest first; empty for a run that looks sound."""
    rules = _RULES if len(run.steps) >= _LEAST else (_rewards_fail,)
    if not run.steps and sum(run.dropped.values()) >= _RECENT:  # the first batch may never be complete
        rules = (_rewards_fail, _dropped)
    return tuple(diagnosis for rule in rules for diagnosis in rule(run))


def _rewards_fail(run: RunMetrics) -> Iterator[Diagnosis]:
    if run.failing:
        yield Diagnosis(
            key="reward_fails",
            what=f"No step is made, as rewards fail: {run.failing}",
            cause="The endpoint, or the code of the reward, fails on every group; their rewards are asked for again, and never invented.",
            cure="Fix the cause in the text above; penstock reward errors RUN lists all errors. Groups that wait continue then.",
        )


def _not_finite(run: RunMetrics) -> Iterator[Diagnosis]:
    bad = sum(1 for step in run.steps if step.get("loss_not_finite"))
    if bad:
        yield Diagnosis(
            key="loss_not_finite",
            what=f"The loss was not a finite number in {bad} of {len(run.steps)} steps.",
            cause="The optimisation has diverged, or the numeric format overflows.",
            cure="Lower trainer.lr, add trainer.warmup_steps, or set model.dtype = float32; resume from an older checkpoint.",
        )


def _constant_reward(run: RunMetrics) -> Iterator[Diagnosis]:
    rewards = [step["reward_mean"] for step in run.steps if "reward_mean" in step]
    spreads = [step["reward_std"] for step in run.steps if "reward_std" in step]
    if len(rewards) < _LEAST or max(rewards) != min(rewards) or any(spreads):
        return
    if rewards[0] == 0.0:
        cause = (
            "No completion got a reward: the answer is not in the form that the reward reads, the task is too hard for this "
            "model, or completions are cut before the answer."
        )
        cure = (
            "Read completions with their rewards (penstock lineage RUN --full), score one by hand (penstock reward test), ask "
            "for the form in data.system_prompt, warm up with penstock sft, or begin with easier prompts."
        )
    else:
        cause = "Every completion gets the same reward: the prompts are too easy, or the reward does not tell answers apart."
        cure = "Choose harder prompts, or check the reward with penstock reward test."
    what = f"The reward was {rewards[0]:.2f} for every completion in all {len(rewards)} steps: nothing is learned."
    yield Diagnosis(key="constant_reward", what=what, cause=cause, cure=cure)


def _no_signal(run: RunMetrics) -> Iterator[Diagnosis]:
    share, reward = run.mean("zero_signal_groups"), run.mean("reward_mean")
    if share is None or share < _FEW_SIGNALS or any(_constant_reward(run)):
        return
    course = run.course("zero_signal_groups")
    if share < 1.0 and (len(run.steps) < _RECENT or course is None or course[1] < _FEW_SIGNALS):
        return  # the first steps of a run often have few signals
    cause = "Most prompts are solved either always or never; such a group has no advantage and no gradient."
    if share == 1.0:
        cause = (
            "No group has differing rewards: a group of one completion never has, nor has a sampler without randomness."
        )
    elif reward is not None and reward >= 1.0 - _LOW_ENTROPY:
        cause = "The model solves most prompts every time: they are too easy by now."
    elif reward is not None and abs(reward) <= _LOW_ENTROPY:
        cause = "The model solves most prompts never: they are too hard for it yet."
    yield Diagnosis(
        key="no_signal",
        what=f"{share:.0%} of the groups of the last {len(run.recent)} steps had no signal: all their rewards were equal.",
        cause=cause,
        cure="Raise rollout.group_size, set algorithm.dynamic_sampling = true, or choose prompts that are solved sometimes.",
    )


def _entropy(run: RunMetrics) -> Iterator[Diagnosis]:
    first, course = _mean(run.steps[:_EDGE], "entropy"), run.course("entropy")
    if first is None or course is None:
        return
    now = course[1]
    if now < _LOW_ENTROPY and now < first * _ENTROPY_SHARE:
        yield Diagnosis(
            key="entropy",
            what=f"The entropy has collapsed: from {first:.2g} to {now:.2g} nats per token.",
            cause="The completions of a prompt have become nearly identical: nothing new is tried.",
            cure="Lower trainer.lr, set algorithm.entropy_coefficient (0.001), or keep rollout.temperature at 1; if the reward "
            "is as high as you want, stop here.",
        )


def _learning_rate(run: RunMetrics) -> Iterator[Diagnosis]:
    used, chosen = run.mean("lr"), run.mean("lr_set")
    if used is not None and chosen is not None and 0.0 <= used < chosen * _HALF:
        yield Diagnosis(
            key="lr",
            what=f"The learning rate used is {used:.2g}, where {chosen:.2g} is set.",
            cause="The effective sample size of the batches scales it (algorithm.ess_level): the samples are off-policy.",
            cure="Lower rollout.max_staleness, or switch the rule off: algorithm.ess_level = off.",
        )


@dataclass(frozen=True, slots=True)
class _Bound:
    """A rule about the median of one figure over the newest steps: a spike is no state."""

    figure: str
    is_bad: Callable[[float], bool]
    key: str
    what: str  # {value} and {steps} are replaced
    cause: str
    cure: str
    steps: int = _RECENT

    def __call__(self, run: RunMetrics) -> Iterator[Diagnosis]:
        known = [step[self.figure] for step in run.steps if self.figure in step][-self.steps :]
        if known and self.is_bad(value := median(known)):
            what = self.what.format(value=value, steps=len(known))
            yield Diagnosis(key=self.key, what=what, cause=self.cause, cure=self.cure)


_kl_reference = _Bound(
    figure="kl_reference",
    is_bad=lambda kl: kl > _RUNAWAY,
    key="kl_reference",
    what="The policy has moved {value:.2g} nats per token (KL) away from the reference.",
    cause="The KL term does not hold it: its coefficient is too small for this learning rate.",
    cure="Raise algorithm.kl_coefficient or set algorithm.kl_target, lower trainer.lr, and read completions.",
    steps=_EDGE,
)
_truncated = _Bound(
    figure="truncated_share",
    is_bad=lambda share: share >= _MANY_CUT,
    key="truncated",
    what="{value:.0%} of the completions of the last {steps} steps were cut at rollout.max_new_tokens.",
    cause="The limit is too small for the task, or the model does not end its answers.",
    cure="Raise rollout.max_new_tokens, warm up on examples with penstock sft, or reward brevity (the reward overlong).",
)
_effective_samples = _Bound(
    figure="ess_share",
    is_bad=lambda share: share < _FEW_SAMPLES,
    key="ess",
    what="The effective sample size is {value:.0%} of the tokens: few tokens decide each step.",
    cause="The policy moves far from the versions that sampled: the samples are too old, or the steps too large.",
    cure="Lower rollout.max_staleness or trainer.lr.",
)
_kl = _Bound(
    figure="kl_behaviour",
    is_bad=lambda kl: kl > _FAR_KL,
    key="kl",
    what="The policy is {value:.2g} nats per token (KL) away from the versions that sampled.",
    cause="The samples are too old, or the steps too large.",
    cure="Lower rollout.max_staleness or trainer.lr.",
)
_engine_gap = _Bound(
    figure="engine_gap",
    is_bad=lambda gap: gap > _FAR_GAP,
    key="engine_gap",
    what="Engine and trainer differ by {value:.2g} nats per token for the same weights.",
    cause="They use different numeric formats, kernels or sampling settings.",
    cure="Set model.dtype = float32 for a comparison, and see docs/sglang.md.",
)


def _large_steps(run: RunMetrics) -> Iterator[Diagnosis]:
    largest = max((step["update_ratio"] for step in run.recent if "update_ratio" in step), default=0.0)
    if largest > _LARGE_UPDATE:
        yield Diagnosis(
            key="lr_too_high",
            what=f"One of the last {len(run.recent)} steps changed the weights by {largest:.0%} of their norm.",
            cause="The learning rate is too high: what was learned before is overwritten.",
            cure="Lower trainer.lr tenfold, and start again from the model or an older checkpoint.",
        )


def _off_policy(run: RunMetrics) -> Iterator[Diagnosis]:
    """Say why the ratios are far from 1: an engine that differs, steps that are too large, old samples, or what of it is not known."""
    causes = [*_engine_gap(run), *_large_steps(run)]
    far = [*_effective_samples(run), *_kl(run)]
    age = run.mean("staleness_mean")
    if far and not causes and age is not None and age >= _OLD:
        causes = [
            Diagnosis(
                key="stale",
                what=f"The samples are {age:.1f} versions old on average. {far[0].what}",
                cause="The policy has left the versions that sampled behind, and the algorithm does not correct for as much.",
                cure="Lower rollout.max_staleness (or start more workers), lower trainer.lr, or use algorithm.name = async_grpo.",
            )
        ]
    yield from causes or far


def _never_ends(run: RunMetrics) -> Iterator[Diagnosis]:
    shares = [step["truncated_share"] for step in run.steps if "truncated_share" in step]
    if len(shares) >= _LEAST and min(shares[:_EDGE]) >= _ALL_CUT and min(shares[-_EDGE:]) >= _ALL_CUT:
        yield Diagnosis(
            key="never_ends",
            what=f"{mean(shares):.0%} of the completions were cut at rollout.max_new_tokens, from the first step on.",
            cause="No answer ends: eos_token_id in the model's config.json or generation_config.json is not the token with which its "
            "chat template ends an answer, or the limit is far too small.",
            cure="Read completions (penstock lineage RUN --full): where an answer is followed by more, correct eos_token_id; else raise the limit.",
        )


def _length_drift(run: RunMetrics) -> Iterator[Diagnosis]:
    course = run.course("completion_tokens_mean")
    if course is not None and (course[1] > course[0] * _DRIFT or course[1] * _DRIFT**2 < course[0]):
        yield Diagnosis(
            key="length_drift",
            what=f"Completions went from {course[0]:.0f} to {course[1]:.0f} tokens within {len(run.recent)} steps.",
            cause="The reward pays for length itself, or answers with the same reward differ in length and nothing holds it.",
            cure="Read completions; reward brevity (the reward overlong), or use algorithm.name = dr_grpo.",
        )


def _not_understood(run: RunMetrics) -> Iterator[Diagnosis]:
    first = run.steps[:_LEAST]
    entropy, silent, cut = (_mean(first, name) or 0.0 for name in ("entropy", "zero_signal_groups", "truncated_share"))
    if entropy > _AT_RANDOM or (silent >= _NEARLY_ALL and cut >= _MANY_CUT):
        yield Diagnosis(
            key="not_understood",
            what=f"From the first step on, {silent:.0%} of the groups taught nothing, and {cut:.0%} of the completions did not end "
            f"({entropy:.2g} nats per token).",
            cause="The prompts are not in the form that the model was trained on (another chat template or tokenizer), it is not trained "
            "yet, or rollout.max_new_tokens is far too small.",
            cure="Compare a prompt (penstock data check) with the template that the model was trained with; warm up on examples with "
            "penstock sft; raise the limit where answers are right so far.",
        )


def _held_out_stays(run: RunMetrics) -> Iterator[Diagnosis]:
    """Say what the training reward rises by when the held-out prompts do not follow: exploited, or memorised."""
    course, spread = run.course("reward_mean"), _mean(run.steps[:_EDGE], "reward_std")
    shown = held_out(run.evaluations)
    if course is None or spread is None or len(shown.points) < _LEAST or shown.before is None:
        return
    rose = course[1] - course[0]
    before, now = shown.before, mean([value for _, value in shown.points[-2:]])
    rewards = [one.reward for one in run.evaluations if one.reward is not None]
    if rose < _HALF * spread or rose <= 0.0 or now > before:
        return
    is_paid = shown.measure == "accuracy" and len(rewards) >= _LEAST and mean(rewards[-2:]) - rewards[0] > _HALF * rose
    what = f"The training reward rose from {course[0]:.2f} to {course[1]:.2f}, and the {shown.name} went from {before:.2f} to {now:.2f}."
    if is_paid:
        yield Diagnosis(
            key="hacked",
            what=what,
            cause="The reward is exploited: held-out answers earn it too, without being correct.",
            cure="Read completions with high rewards (penstock lineage RUN --full), and close the gap: a part as a gate (docs/graders.md).",
        )
    else:
        yield Diagnosis(
            key="memorised",
            what=what,
            cause="The training prompts are memorised: few different ones, or many passes over them.",
            cure="penstock data check counts repeated prompts; use more prompts, or fewer steps.",
        )


def _dropped(run: RunMetrics) -> Iterator[Diagnosis]:
    total = sum(run.dropped.values())
    if run.issued and total >= run.issued * _MANY_DROPPED:
        reason, number = max(run.dropped.items(), key=lambda item: item[1])
        yield Diagnosis(
            key="dropped",
            what=f"{total:,} of {run.issued:,} groups were dropped, {number:,} of them as {reason}.",
            cause=f"{reason}: {MEANINGS.get(reason, OF_A_FILTER)}.",
            cure=f"Read some of them: penstock samples RUN --dropped {reason}; the report has them by reason.",
        )


def _reward_fell(run: RunMetrics) -> Iterator[Diagnosis]:
    rewards = [step["reward_mean"] for step in run.steps if "reward_mean" in step]
    if len(rewards) < 3 * _RECENT:
        return
    width = max(len(rewards) // 10, _RECENT // 2)
    tenths = [mean(rewards[at : at + width]) for at in range(0, len(rewards) - width + 1, width)]
    first, best, last = tenths[0], max(tenths), mean(rewards[-width:])
    if best - first > _LOW_ENTROPY * (max(rewards) - min(rewards)) and best - last > _HALF * (best - first):
        yield Diagnosis(
            key="reward_fell",
            what=f"The reward rose to {best:.2f} and fell to {last:.2f}.",
            cause="The steps are too large, or the policy found answers that the filters and corrections reject.",
            cure="Lower trainer.lr or rollout.max_staleness, and use the version with the best evaluation: penstock weights RUN.",
        )


_RULES: tuple[Callable[[RunMetrics], Iterator[Diagnosis]], ...] = (
    _not_finite, _rewards_fail, _never_ends, _not_understood, _constant_reward, _off_policy, _held_out_stays, _kl_reference, _length_drift,
    _entropy, _no_signal, _truncated, _reward_fell, _learning_rate, _dropped,
)  # fmt: skip


def _mean(steps: Sequence[Figures], name: str) -> float | None:
    return known_mean([step[name] for step in steps if name in step])
