"""Diagnose why a run does not learn: metrics of its steps in, sentences out; pure.

Each rule looks at the newest steps and names what it saw, the usual cause and the fix. The metrics are those of
`learning.read`, and ``reward_mean``. The reasons for which groups are dropped are explained by their values in events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.console.report.learning import known_mean, mean
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
_FEW_SIGNALS, _MANY_DROPPED, _LOW_ENTROPY, _ENTROPY_SHARE, _HALF = 0.5, 0.2, 0.1, 0.1, 0.5


@dataclass(frozen=True, slots=True)
class RunMetrics:
    steps: Sequence[Figures]  # in order, those of the whole run
    issued: int = 0  # groups
    dropped: Mapping[str, int] = field(default_factory=dict)  # groups by reason

    @property
    def recent(self) -> Sequence[Figures]:
        return self.steps[-_RECENT:]

    def mean(self, name: str) -> float | None:
        return _mean(self.recent, name)


def diagnose(run: RunMetrics) -> tuple[Diagnosis, ...]:
    """Return what is wrong with a run's learning, the gravest first; empty for a run that looks sound."""
    if not run.steps and sum(run.dropped.values()) >= _RECENT:  # the first batch may never be complete
        return tuple(_dropped(run))
    if len(run.steps) < _LEAST:
        return ()
    return tuple(diagnosis for rule in _RULES for diagnosis in rule(run))


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
    if share < 1.0 and len(run.steps) < _RECENT:  # the first steps of a run often have few signals
        return
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
    first, now = _mean(run.steps[:_RECENT], "entropy"), run.mean("entropy")
    if first is None or now is None or len(run.steps) < _RECENT:
        return
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
    """A rule about the mean of one figure over the newest steps."""

    figure: str
    is_bad: Callable[[float], bool]
    key: str
    what: str  # {value} and {steps} are replaced
    cause: str
    cure: str

    def __call__(self, run: RunMetrics) -> Iterator[Diagnosis]:
        value = run.mean(self.figure)
        if value is not None and self.is_bad(value):
            what = self.what.format(value=value, steps=len(run.recent))
            yield Diagnosis(key=self.key, what=what, cause=self.cause, cure=self.cure)


_truncated = _Bound(
    figure="truncated_share",
    is_bad=lambda share: share >= 0.25,
    key="truncated",
    what="{value:.0%} of the completions of the last {steps} steps were cut at rollout.max_new_tokens.",
    cause="The limit is too small for the task, or the model does not end its answers.",
    cure="Raise rollout.max_new_tokens, warm up on examples with penstock sft, or reward brevity (the reward overlong).",
)
_effective_samples = _Bound(
    figure="ess_share",
    is_bad=lambda share: share < 0.5,
    key="ess",
    what="The effective sample size is {value:.0%} of the tokens: few tokens decide each step.",
    cause="The policy moves far from the versions that sampled: the samples are too old, or the steps too large.",
    cure="Lower rollout.max_staleness or trainer.lr.",
)
_kl = _Bound(
    figure="kl_behaviour",
    is_bad=lambda kl: kl > 0.1,
    key="kl",
    what="The policy is {value:.2g} nats per token (KL) away from the versions that sampled.",
    cause="The samples are too old, the steps too large, or engine and trainer compute different log-probabilities.",
    cure="Lower rollout.max_staleness or trainer.lr; compare the engine gap below.",
)
_engine_gap = _Bound(
    figure="engine_gap",
    is_bad=lambda gap: gap > 0.05,
    key="engine_gap",
    what="Engine and trainer differ by {value:.2g} nats per token for the same weights.",
    cause="They use different numeric formats, kernels or sampling settings.",
    cure="Set model.dtype = float32 for a comparison, and see docs/sglang.md.",
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
    _not_finite, _constant_reward, _no_signal, _truncated, _reward_fell, _entropy, _effective_samples, _kl, _engine_gap,
    _learning_rate, _dropped,
)  # fmt: skip


def _mean(steps: Sequence[Figures], name: str) -> float | None:
    return known_mean([step[name] for step in steps if name in step])
