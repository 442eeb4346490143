"""Names, units and formulas of what a step reports; pure.

Where a batch has several optimizer steps, its metrics are means over them, each measured before its update.

| name                       | unit     | means                                                              |
|----------------------------|----------|--------------------------------------------------------------------|
| `step`, `version`          |          | batches trained; version the batch was trained at                   |
| `loss`                     |          | the objective, all denominators applied                            |
| `reward_mean`, `reward_std`|          | over the batch's trajectories                                      |
| `baseline_mean`            |          | reward of the greedy completions; remax only                       |
| `zero_signal_groups`       | share    | groups whose rewards are all equal: no advantage, no gradient      |
| `grad_norm`, `lr`          |          | norm before clipping; learning rate that this step used            |
| `lr_set`                   |          | that of the schedule; lr is less where the ESS rule scaled it      |
| `grad_norm_by_layers`      |          | norm before clipping of each group of layers: `step_metrics.py`    |
| `update_ratio`             | share    | norm of the change of the weights over theirs; of what is trained  |
| `update_ratio_by_layers`   | share    | the same of each group of layers                                   |
| `updates_left_out`         |          | optimizer steps that were not made, why is in `skipped`; if any    |
| `clip_fraction`            | share    | sampled tokens whose gradient is zero because of the clip          |
| `dual_clip_fraction`       | share    | the same for the dual clip                                         |
| `rejected_fraction`        | share    | the same for masks of stale or mismatched samples                  |
| `updates`                  |          | optimizer steps on the batch; with several only, and the next two  |
| `clip_fraction_by_pass`    | share    | `clip_fraction` of each pass over the batch                        |
| `kl_proximal_by_pass`      | nats     | KL(proximal policy ‖ policy) per token, k3, of each pass           |
| `skipped`                  | rows     | trajectories that filters excluded from the step, by reason        |
| `ratio_mean`, `ratio_max`  |          | the loss's ratio to its anchor, before each optimizer step         |
| `ess_share`                | share    | effective sample size of the token weights, (Σr)² / (N Σr²)        |
| `rejected_by`              | share    | `rejected_fraction` of each rule that is on                        |
| `kl_behaviour`, …          | nats     | trainer against engine: see `trainer/algorithm/mismatch.py`        |
| `mismatch_unseen_steps`    | steps    | since engine and trainer could last be compared: `mismatch.py`     |
| `entropy`                  | nats     | of the behaviour policy per token, from the sampled tokens         |
| `policy_entropy`           | nats     | of the policy per token, exact; with an entropy bonus only         |
| `kl_reference`             | nats     | KL(policy ‖ reference) per token, k3; with a KL term only          |
| `kl_teacher`               | nats     | KL(policy ‖ teacher) per token, k1 on sampled tokens               |
| `kl_from_teacher`          | nats     | KL(teacher ‖ policy) per position, over its top_k; forward only    |
| `taught_by`                | groups   | by teacher, its model and version                                  |
| `pair_loss`                |          | the preference loss of the step's pairs; with them only             |
| `pair_accuracy`            | share    | pairs whose chosen answer has the higher reward of that loss       |
| `pair_margin`              |          | mean difference of these rewards; `pair_reward_chosen`,            |
|                            |          | `pair_reward_rejected` are their means                             |
| `pairs_trained`            | pairs    | of this step, beside its groups: `algorithm.dpo_coefficient`       |
| `reward_kl`                | nats     | KL(sampler ‖ reference) per token, subtracted from the reward      |
| `kl_coefficient`           |          | used by the step, in loss or reward, adaptive or fixed             |
| `ess_lr`                   | share    | effective share of the batch that scaled lr; with that rule only   |
| `rerouted_fraction`        | share    | (token, layer) pairs whose router chooses other experts than the engine did |
| `value_loss`               |          | the critic's, on the batch before its update; ppo only             |
| `explained_variance`       | share    | of the returns, by the critic; 1 perfect, 0 no better than the mean|
| `value_mean`, `return_mean`|          | the critic's values per token, and its targets                     |
| `critic_grad_norm`, `_lr`  |          | norm before clipping and learning rate of the critic's update      |
| `staleness_mean`, `_max`   | versions | of the sampled tokens                                              |
| `staleness_tokens`         | tokens   | histogram by age                                                   |
| `scored_by`                | groups   | by scorer of their rewards, endpoints with their version           |
| `reward_parts`             |          | mean of every reward part over the trajectories that have it       |
| `environments`             |          | of each environment, see below                                     |
| `completion_tokens_mean`   | tokens   | per trajectory; `truncated_share` of them hit max_new_tokens       |
| `tokens_trained`           | tokens   | sampled tokens of this step                                        |
| `reused_groups`            | groups   | of this step, trained before: `algorithm.max_trained_count`        |
| `logprobs_lost`            | steps    | of this session, not stored: `telemetry/logprob_writer.py`          |
| `groups_digest`            | sha256   | what was trained, for an audit: `protocol/record/lineage.py`   |
| `groups`                   | groups   | issued, scored, trained, reused, dropped by reason, of the run;    |
|                            |          | `abandoned_completions`, `abandoned_tokens`: redundant, by reason  |
| `computed_tokens`          | tokens   | of all passes of the policy; a shared prefix once, padding too     |
| `train_tokens_per_s`       | tokens/s | `tokens_trained` by `step_s`                                       |
| `flops_per_s`              | FLOP/s   | of the policy's passes, over all ranks, by `step_s`: `flops.py`    |
| `mfu`                      | share    | of the devices' peak; where that is known                          |
| `wait_s`, `step_s`         | s        | wait for the batch; plan, forward, backward and update             |
| `turns`                    |          | of the trainer on GPUs that engines use too, in this session       |
| `turn_wait_s`, `turn_move_s` | s      | waits for these turns since the step before; moves of its states   |
| `publish_s`                | s        | of the newest publication, which runs in parallel                  |
| `publish_stages_s`         | s        | the same by stage: compare (and encode), upload, announce          |
| `record_s`, `submit_s`     | s        | enter the step in the run record; copy the new weights             |
| `checkpoint_s`             | s        | that training stood still for a checkpoint before this step, if any|

Of each environment whose episodes a step trains on:

| name            | unit     | means                                                                             |
|-----------------|----------|-----------------------------------------------------------------------------------|
| `episodes`      |          | of this step                                                                      |
| `reward_mean`   |          | over its episodes                                                                 |
| `turns_mean`    |          | answers of the policy that are trained, of one episode                            |
| `tokens_mean`   | tokens   | sampled tokens of one episode                                                     |
| `cut_share`     | share    | ended by a limit instead of by the environment                                    |
| `failures`      |          | failed attempts at these episodes before; each was started again with its seed    |
| `versions`      | episodes | by version of the environment's rules, where it has versions                      |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from penstock.protocol.episode import Episode
from penstock.trainer.algorithm.mismatch import mismatch_metrics
from penstock.trainer.learner.flops import Work
from penstock.trainer.learner.pair_planner import pair_metrics
from penstock.trainer.learner.step_metrics import ALL, LayerMetrics, StepMetrics
from penstock.trainer.learner.step_plan import ReadyGroup


def step_fields(
    step: int, version: int, metrics: StepMetrics, batch: Sequence[ReadyGroup], staleness_tokens: Mapping[int, int]
) -> dict[str, Any]:
    trained = [group.trained for group in batch]
    rewards = [reward for group in trained for reward in group.rewards]
    baselines = [group.baseline[0] for group in trained if group.baseline is not None]
    lengths = [count for group in trained for count in group.lengths]
    cut = [is_cut for group in trained for is_cut in group.truncated]
    sums, num_tokens = metrics.sums, max(1.0, metrics.sums["tokens"])
    return {
        "step": step,
        "version": version,
        "loss": metrics.loss,
        "reward_mean": fmean(rewards),
        "reward_std": pstdev(rewards),
        **({"baseline_mean": fmean(baselines)} if baselines else {}),
        "zero_signal_groups": fmean(max(g.scored.rewards) == min(g.scored.rewards) for g in batch),
        "grad_norm": metrics.grad_norm,
        "lr": metrics.lr,
        **({"lr_set": metrics.lr / metrics.lr_factor} if metrics.lr_factor else {}),
        "clip_fraction": sums["clipped"] / num_tokens,
        "dual_clip_fraction": sums["dual_clipped"] / num_tokens,
        "rejected_fraction": sums["rejected"] / num_tokens,
        "ratio_mean": sums["ratio"] / num_tokens,
        "ratio_max": metrics.maxima["ratio"],
        "ess_share": sums["ratio"] ** 2 / (num_tokens * sums["ratio_squared"]) if sums["ratio_squared"] else 1.0,
        **(_of_tokens(sums, metrics.maxima) if sums["tokens"] else {}),
        **pair_metrics(sums),
        **_by_pass(metrics),
        **layer_fields(metrics.layers),
        **metrics.critic,
        "staleness_mean": sum(age * n for age, n in staleness_tokens.items()) / sum(staleness_tokens.values()),
        "staleness_max": max(staleness_tokens),
        "staleness_tokens": {str(age): count for age, count in staleness_tokens.items()},
        "scored_by": dict(sorted(Counter(group.scored.scorer for group in batch).items())),
        **(
            {"taught_by": dict(sorted(taught.items()))}
            if (taught := Counter(g.group.teacher.model for g in batch if g.group.teacher))
            else {}
        ),
        **({"reward_parts": parts} if (parts := reward_parts(batch)) else {}),
        **({"environments": played} if (played := environment_metrics(batch)) else {}),
        "completion_tokens_mean": fmean(lengths),
        "truncated_share": fmean(cut),
        "tokens_trained": int(sums["tokens"]),
    }


def reward_parts(batch: Sequence[ReadyGroup]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for group in batch:
        for name, column in group.scored.parts.items():
            values.setdefault(name, []).extend(column[: group.scored.generated.num_trained])
    return {name: fmean(column) for name, column in sorted(values.items())}


def _by_pass(metrics: StepMetrics) -> dict[str, Any]:
    if not metrics.passes:
        return {}
    return {
        "updates": sum(measured.num_updates for measured in metrics.passes),
        "clip_fraction_by_pass": [measured.clip_fraction for measured in metrics.passes],
        "kl_proximal_by_pass": [measured.kl_proximal for measured in metrics.passes],
    }


def layer_fields(by_group: Mapping[str, LayerMetrics]) -> dict[str, Any]:
    layers = dict(by_group)
    whole = layers.pop(ALL, None)
    ratios = {name: layer.update_ratio for name, layer in layers.items() if layer.update_ratio is not None}
    return {
        **({"grad_norm_by_layers": {name: layer.grad_norm for name, layer in layers.items()}} if layers else {}),
        **({"update_ratio": whole.update_ratio} if whole and whole.update_ratio is not None else {}),
        **({"update_ratio_by_layers": ratios} if ratios else {}),
    }


def _of_tokens(sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, Any]:
    num_tokens = sums["tokens"]
    fields: dict[str, Any] = mismatch_metrics(sums, maxima) | {"entropy": sums["surprise"] / num_tokens}
    fields |= {
        name: sums[key] / num_tokens
        for name, key in (
            ("policy_entropy", "entropy"),
            ("kl_reference", "kl_reference"),
            ("kl_teacher", "kl_teacher"),
            ("kl_from_teacher", "kl_from_teacher"),
        )
        if key in sums
    }
    by_rule = {
        name.removeprefix("rejected_"): n / num_tokens for name, n in sums.items() if name.startswith("rejected_")
    }
    if by_rule:
        fields["rejected_by"] = by_rule
    if sums.get("ess_weight_squared"):
        fields["ess_lr"] = sums["ess_weight"] ** 2 / (sums["ess_count"] * sums["ess_weight_squared"])
    if sums.get("routed"):
        fields["rerouted_fraction"] = sums["rerouted"] / sums["routed"]
    return fields


def environment_metrics(batch: Sequence[ReadyGroup]) -> dict[str, dict[str, Any]]:
    by_environment: dict[str, list[tuple[Episode, float, int]]] = {}
    for group in batch:
        trained = group.trained
        episodes = group.group.episodes[: len(trained.rewards)]
        for played in zip(episodes, trained.rewards, trained.lengths, strict=False):
            by_environment.setdefault(played[0].environment, []).append(played)
    return {name: _figures(episodes) for name, episodes in sorted(by_environment.items())}


def _figures(played: Sequence[tuple[Episode, float, int]]) -> dict[str, Any]:
    episodes = [episode for episode, _, _ in played]
    versions = Counter(e.environment_version for e in episodes if e.environment_version)
    return {
        "episodes": len(episodes),
        "reward_mean": fmean(reward for _, reward, _ in played),
        "turns_mean": fmean(len(e.turns) for e in episodes),
        "tokens_mean": fmean(length for _, _, length in played),
        "cut_share": fmean(e.status != "done" for e in episodes),
        "failures": sum(e.attempt for e in episodes),
        **({"versions": dict(sorted(versions.items()))} if versions else {}),
    }


def speed_fields(work: Work, *, num_tokens: int, step_s: float, peak: float | None) -> dict[str, Any]:
    """Return the fields of a step's event about its speed; ``peak`` is in operations per second, None: not known."""
    seconds = max(step_s, 1e-9)
    flops_per_s = work.flops / seconds
    return {
        "computed_tokens": int(work.tokens),
        "train_tokens_per_s": num_tokens / seconds,
        "flops_per_s": flops_per_s,
        **({"mfu": flops_per_s / peak} if peak else {}),
    }
