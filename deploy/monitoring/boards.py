"""Define the Grafana dashboards as tables: rows of panels. `dashboards` writes the JSON.

Every metric of the table is in one of them at least. A panel's query follows from the metric's kind, its unit and description
from the table; a row gives a query only where this default is not what people look at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.protocol.metrics.table import METRICS, Metric

INTERVAL = "$__rate_interval"  # Grafana's: at least four scrapes
INFO = "penstock_service_info"  # has the worker's name, which samples of one service only do not repeat
_SELECTOR = re.compile(r"\b(penstock_\w+)(?:\{([^}]*)\})?")
_QUANTILES = (0.5, 0.9, 0.99)
_BEHIND = 'max by (run) (penstock_weights_version{role="trainer"}) - on (run) group_right () penstock_weights_version{role="rollout"}'
_FROM_ENDPOINTS = "a reward over HTTP"
_FROM_ENGINE = "an engine that reports it"
_REDUNDANT = "rollout.redundant_completions"
_FROM_GPU = "a GPU and the extra gpu"


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression without the choice of a run, and the legend of its series."""

    expr: str
    legend: str

    def of_run(self) -> str:
        """Return the expression with every metric restricted to the run that is chosen in the dashboard; "All" is `.*`."""
        return _SELECTOR.sub(lambda found: f'{found[1]}{{run=~"$run"{", " + found[2] if found[2] else ""}}}', self.expr)


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel; ``needs`` says what must have happened before it has data, empty where every run has some."""

    title: str
    queries: tuple[Query, ...]
    unit: str
    description: str
    needs: str = ""


def of(title: str, name: str, *, expr: str = "", legend: str = "", needs: str = "", unit: str = "") -> Panel:
    """Return the panel of a metric: by default what its kind is read by, over time.

    A counter is shown as its rate, a histogram or summary by three quantiles, a gauge as it is; what one process of several
    shows is joined with its name. Raises KeyError for a metric that the table does not have.
    """
    metric = METRICS[name]
    queries = (Query(expr, legend),) if expr else tuple(_queries(metric))
    return Panel(title, queries, unit or _unit(metric), metric.help, needs)


def _queries(metric: Metric) -> Iterator[Query]:
    legend = " ".join(f"{{{{{label}}}}}" for label in metric.labels)
    by = ", ".join(metric.labels)
    if metric.kind == "counter":
        yield Query(f"sum by ({by}) (rate({metric.name}[{INTERVAL}]))", legend or "all")
    elif metric.kind == "histogram":
        buckets = f"sum by ({', '.join((*metric.labels, 'le'))}) (rate({metric.name}_bucket[{INTERVAL}]))"
        for q in _QUANTILES:
            yield Query(f"histogram_quantile({q}, {buckets})", f"{legend} p{100 * q:g}".strip())
    elif metric.kind == "summary":
        yield Query(metric.name, f"{legend} p{{{{quantile}}}}".strip())
    elif metric.services != ("trainer",) and "worker" not in metric.labels:
        yield Query(
            f"{metric.name} * on (job, instance) group_left (worker) {INFO}", f"{{{{worker}}}} {legend}".strip()
        )
    else:
        yield Query(metric.name, legend or "{{run}}")


def _unit(metric: Metric) -> str:
    if metric.kind == "counter":
        return "percentunit" if metric.unit == "s" else f"suffix: {metric.unit}/s"
    known = {"s": "s", "0 to 1": "percentunit", "bytes": "bytes", "": "short", "0 or 1": "bool"}
    return known.get(metric.unit, f"suffix: {metric.unit}")


@dataclass(frozen=True, slots=True)
class Dashboard:
    uid: str
    title: str
    description: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]

    def panels(self) -> Iterator[Panel]:
        for _title, panels in self.rows:
            yield from panels


def _step_age(name: str) -> str:
    return f"time() - {name}"


_GPUS = (
    "GPUs",
    (
        of("GPUs", "penstock_gpus", needs=_FROM_GPU),
        of("Utilisation", "penstock_gpu_utilisation_ratio", needs=_FROM_GPU),
        of("GPU memory in use", "penstock_gpu_memory_used_ratio", needs=_FROM_GPU),
        of("Temperature", "penstock_gpu_temperature_celsius", needs=_FROM_GPU),
        of("Power", "penstock_gpu_power_watts", needs=_FROM_GPU),
    ),
)

OVERVIEW = Dashboard(
    "penstock-overview",
    "Penstock: overview",
    "Whether a run trains and learns, and which service waits.",
    (
        (
            "Alive",
            (
                of("Services", INFO, expr=f"count by (role) ({INFO})", legend="{{role}}"),
                of("Age of the heartbeats", "penstock_heartbeat_timestamp_seconds", expr="time() - penstock_heartbeat_timestamp_seconds", legend="{{role}} {{worker}}", unit="s"),
                of("Age of the newest step", "penstock_trainer_last_step_timestamp_seconds", expr=_step_age("penstock_trainer_last_step_timestamp_seconds"), legend="step", unit="s"),
                of("Age of the checkpoint", "penstock_trainer_last_checkpoint_timestamp_seconds", expr=_step_age("penstock_trainer_last_checkpoint_timestamp_seconds"), legend="checkpoint", unit="s", needs="a checkpoint"),
            ),
        ),
        (
            "Learning",
            (
                of("Reward", "penstock_trainer_reward_mean"),
                of("Held-out accuracy", "penstock_eval_accuracy_ratio", needs="an evaluation"),
                of("Steps a minute", "penstock_trainer_steps_total", expr=f"60 * sum by (run) (rate(penstock_trainer_steps_total[{INTERVAL}]))", legend="{{run}}", unit="suffix: steps/min"),
                of("Tokens", "penstock_tokens_total"),
            ),
        ),
        (
            "Which service waits",
            (
                of("Waiting, share of the time", "penstock_idle_seconds_total", expr=f"avg by (role) (rate(penstock_idle_seconds_total[{INTERVAL}]))", legend="{{role}}"),
                of("Working, share of the time", "penstock_busy_seconds_total", expr=f"avg by (role) (rate(penstock_busy_seconds_total[{INTERVAL}]))", legend="{{role}}"),
                of("Queues", "penstock_queue_pending", expr="sum by (stream) (penstock_queue_pending)", legend="{{stream}}"),
                of("CPU cores", "penstock_cpu_seconds_total", unit="short"),
            ),
        ),
        (
            "What becomes of the groups",
            (
                of("Groups by outcome", "penstock_groups_total", expr=f"sum by (outcome) (rate(penstock_groups_total[{INTERVAL}]))", legend="{{outcome}}"),
                of("Dropped, by reason", "penstock_groups_total", expr=f'sum by (reason) (rate(penstock_groups_total{{outcome="dropped"}}[{INTERVAL}]))', legend="{{reason}}", needs="a dropped group"),
                of("Age of trained tokens", "penstock_trained_staleness_versions"),
                of("Versions behind the trainer", "penstock_weights_version", expr=_BEHIND, legend="{{worker}}"),
            ),
        ),
    ),
)  # fmt: skip
ROLLOUT = Dashboard(
    "penstock-rollout",
    "Penstock: rollout fleet",
    "Every worker and its engine: one sick engine hides in averages.",
    (
        (
            "Fleet",
            (
                of("Workers", INFO, expr=f'count by (version) ({INFO}{{role="rollout"}})', legend="release {{version}}"),
                of("Tokens per second", "penstock_rollout_tokens_per_second"),
                Panel(
                    "Slowest, mean and fastest worker",
                    (
                        Query("min(penstock_rollout_tokens_per_second)", "slowest"),
                        Query("avg(penstock_rollout_tokens_per_second)", "mean"),
                        Query("max(penstock_rollout_tokens_per_second)", "fastest"),
                    ),
                    "suffix: tokens/s",
                    METRICS["penstock_rollout_tokens_per_second"].help,
                ),
                of("Waiting, share of the time", "penstock_idle_seconds_total", expr=f'rate(penstock_idle_seconds_total{{role="rollout"}}[{INTERVAL}])', legend="{{worker}}"),
                of("CPU cores", "penstock_cpu_seconds_total", expr=f'rate(penstock_cpu_seconds_total{{role="rollout"}}[{INTERVAL}])', legend="{{worker}}", unit="short"),
                of("Free disk space at the cache", "penstock_disk_free_ratio", expr='penstock_disk_free_ratio{role="rollout"}', legend="{{worker}} {{folder}}"),
            ),
        ),
        (
            "Packs and weights",
            (
                of("Packs", "penstock_rollout_packs_total"),
                of("Packs of unknown weights", "penstock_rollout_packs_unverified_total"),
                of("Packs held", "penstock_rollout_packs_held"),
                of("Completions abandoned", "penstock_rollout_abandoned_completions_total"),
                of("Ended episodes, by outcome", "penstock_rollout_episodes_total"),
                of("Groups generated", "penstock_groups_total", expr=f'sum by (outcome) (rate(penstock_groups_total{{outcome=~"generated|dead_lettered"}}[{INTERVAL}]))', legend="{{outcome}}"),
                of("Version served", "penstock_weights_version", expr='penstock_weights_version{role="rollout"}', legend="{{worker}}"),
                of("Versions behind the trainer", "penstock_weights_version", expr=_BEHIND, legend="{{worker}}"),
                of("Versions applied", "penstock_rollout_weights_applied_total"),
            ),
        ),
        (
            "Engines",
            (
                of("Decoding", "penstock_engine_running", needs=_FROM_ENGINE),
                of("Waiting in the engine", "penstock_engine_queued", needs=_FROM_ENGINE),
                of("Paused by an update", "penstock_engine_paused", needs=_FROM_ENGINE),
                of("Decoded tokens per second", "penstock_engine_tokens_per_second", needs=_FROM_ENGINE),
                of("Generated tokens", "penstock_engine_generated_tokens_total", needs=_FROM_ENGINE),
                of("Prompt tokens", "penstock_engine_prompt_tokens_total", needs=_FROM_ENGINE),
                of("Prompt tokens from the cache", "penstock_engine_cached_tokens_total", needs=_FROM_ENGINE),
                of("Prefix cache hits", "penstock_engine_cache_hit_ratio", needs=_FROM_ENGINE),
                of("Key-value cache in use", "penstock_engine_kv_cache_ratio", needs=_FROM_ENGINE),
                of("Aborted requests", "penstock_engine_aborted_total", needs=_FROM_ENGINE),
                of("Preempted sequences", "penstock_engine_retracted_total", needs=_FROM_ENGINE),
            ),
        ),
        _GPUS,
    ),
)  # fmt: skip
TRAINER = Dashboard(
    "penstock-trainer",
    "Penstock: trainer",
    "What the newest step learned from, and what it cost. docs/metrics.md has the healthy ranges.",
    (
        (
            "Learning",
            (
                of("Reward", "penstock_trainer_reward_mean"),
                of("Standard deviation of the reward", "penstock_trainer_reward_stddev"),
                of("Parts of the reward", "penstock_trainer_reward_part_mean", needs="a reward with parts"),
                of("Reward by environment", "penstock_trainer_environment_reward_mean", needs="episodes"),
                of("Turns by environment", "penstock_trainer_environment_turns_mean", needs="episodes"),
                of("Tokens of an episode", "penstock_trainer_environment_tokens_mean", needs="episodes"),
                of("Failed attempts by environment", "penstock_trainer_environment_failed_attempts", needs="episodes"),
                of("Held-out reward", "penstock_eval_reward_mean", needs="an evaluation"),
                of("Held-out accuracy", "penstock_eval_accuracy_ratio", needs="an evaluation"),
                of("Evaluated version", "penstock_eval_version", needs="an evaluation"),
                of("Entropy", "penstock_trainer_entropy_nats"),
                of("Length of the completions", "penstock_trainer_completion_tokens_mean"),
                of("Cut completions", "penstock_trainer_truncated_ratio"),
                of("Groups without a signal", "penstock_trainer_zero_signal_groups_ratio"),
            ),
        ),
        (
            "Optimisation",
            (
                of("Loss", "penstock_trainer_loss"),
                of("Gradient norm", "penstock_trainer_gradient_norm"),
                of("Gradient norm by layers", "penstock_trainer_layer_gradient_norm"),
                of("Update to weight ratio", "penstock_trainer_layer_update_ratio"),
                of("Optimizer steps left out", "penstock_trainer_updates_left_out_total"),
                of("Learning rate", "penstock_trainer_learning_rate"),
                of("KL divergence", "penstock_trainer_kl_nats"),
                of("Effective sample size", "penstock_trainer_ess_ratio"),
                of("Clipped tokens", "penstock_trainer_clip_ratio"),
                of("Rejected tokens", "penstock_trainer_rejected_ratio"),
                of("Engine against trainer", "penstock_trainer_engine_mismatch_nats", needs="tokens of the trainer's own version"),
            ),
        ),
        (
            "Age of the data",
            (
                of("Age of trained tokens", "penstock_trained_staleness_versions"),
                of("Mean age in the newest step", "penstock_trainer_staleness_versions_mean"),
                of("Dropped, by reason", "penstock_groups_total", expr=f'sum by (reason) (rate(penstock_groups_total{{outcome="dropped"}}[{INTERVAL}]))', legend="{{reason}}", needs="a dropped group"),
                of("Groups under way", "penstock_trainer_groups_outstanding"),
                of("Completions abandoned, by reason", "penstock_trainer_abandoned_completions_total", needs=_REDUNDANT),
                of("Tokens of abandoned completions", "penstock_trainer_abandoned_tokens_total", needs=_REDUNDANT),
            ),
        ),
        (
            "Time",
            (
                of("Seconds of a step, by phase", "penstock_trainer_step_seconds", expr=f"sum by (phase) (rate(penstock_trainer_step_seconds_sum[{INTERVAL}])) / sum by (phase) (rate(penstock_trainer_step_seconds_count[{INTERVAL}]))", legend="{{phase}}"),
                of("Slow steps, by phase", "penstock_trainer_step_seconds"),
                of("Tokens per second of training", "penstock_trainer_tokens_per_second"),
                of("Floating-point operations per second", "penstock_trainer_flops_per_second"),
                of("Share of the peak (MFU)", "penstock_trainer_mfu_ratio", needs="a GPU of the table, or trainer.peak_flops"),
                of("Trained tokens", "penstock_tokens_total", expr=f'sum(rate(penstock_tokens_total{{outcome="trained"}}[{INTERVAL}]))', legend="trained"),
                of("Steps", "penstock_trainer_steps_total"),
                of("Steps without stored log-probabilities", "penstock_trainer_logprobs_lost_total"),
                of("Published version", "penstock_weights_version", expr='penstock_weights_version{role="trainer"}', legend="trainer"),
                of("Published versions, by kind", "penstock_weights_published_total"),
            ),
        ),
    ),
)  # fmt: skip
REWARD = Dashboard(
    "penstock-reward",
    "Penstock: reward service",
    "What is scored, what fails, and which endpoint is slow.",
    (
        (
            "Service",
            (
                of("Groups, by reward", "penstock_reward_groups_scored_total"),
                of("Completions", "penstock_reward_completions_scored_total"),
                of("Dead-lettered groups", "penstock_reward_groups_dead_total", needs="a dead letter"),
                of("Requeued groups", "penstock_reward_groups_waited_total", needs="a reward that was unavailable"),
                of("Deliveries", "penstock_reward_packs_total"),
                of("Deliveries with a failure", "penstock_reward_pack_errors_total"),
                of("Seconds of a delivery", "penstock_reward_pack_seconds"),
                of("Packs held", "penstock_reward_packs_held"),
                of("Packs waiting", "penstock_reward_packs_waiting"),
                of("Working, share of the time", "penstock_reward_busy_seconds_total"),
                of("Waiting, share of the time", "penstock_reward_idle_seconds_total"),
                of("CPU cores", "penstock_reward_cpu_seconds_total", unit="short"),
            ),
        ),
        (
            "Endpoints",
            (
                of("Calls", "penstock_reward_endpoint_calls_total", needs=_FROM_ENDPOINTS),
                of("Failed calls", "penstock_reward_endpoint_errors_total", needs=_FROM_ENDPOINTS),
                of("Seconds of a call", "penstock_reward_request_seconds", needs=_FROM_ENDPOINTS),
                of("Seconds of the most recent calls", "penstock_reward_endpoint_seconds", needs=_FROM_ENDPOINTS),
                of("Groups in calls", "penstock_reward_endpoint_under_way", needs=_FROM_ENDPOINTS),
                of("Groups queued", "penstock_reward_endpoint_waiting", needs=_FROM_ENDPOINTS),
                of("Further tries", "penstock_reward_endpoint_retries_total", needs=_FROM_ENDPOINTS),
                of("Hedged requests", "penstock_reward_endpoint_hedges_total", needs=_FROM_ENDPOINTS),
                of("Turned away", "penstock_reward_endpoint_turned_away_total", needs=_FROM_ENDPOINTS),
                of("Circuit breaker open", "penstock_reward_endpoint_breaker_open", needs=_FROM_ENDPOINTS),
            ),
        ),
    ),
)  # fmt: skip
STORAGE = Dashboard(
    "penstock-storage",
    "Penstock: NATS and S3",
    "The run's queues in NATS, what goes through S3, and the disks of trainer and workers.",
    (
        (
            "Queues in NATS",
            (
                of("Waiting", "penstock_queue_pending"),
                of("Held by readers", "penstock_queue_ack_pending"),
                of("Delivered again", "penstock_queue_redelivered"),
                of("Packs waiting for a reward", "penstock_reward_packs_waiting"),
                of("Deliveries with a failure", "penstock_reward_pack_errors_total"),
                of("Packs, by outcome", "penstock_rollout_packs_total"),
            ),
        ),
        (
            "Objects in S3 and disks",
            (
                of("Uploaded weights", "penstock_weights_published_bytes_total", unit="Bps"),
                of("Versions, by kind", "penstock_weights_published_total"),
                of("Seconds of a publication", "penstock_trainer_step_seconds", expr=f'histogram_quantile(0.9, sum by (le) (rate(penstock_trainer_step_seconds_bucket{{phase="publish"}}[{INTERVAL}])))', legend="p90"),
                of("Seconds of a checkpoint", "penstock_trainer_step_seconds", expr=f'histogram_quantile(0.9, sum by (le) (rate(penstock_trainer_step_seconds_bucket{{phase="checkpoint"}}[{INTERVAL}])))', legend="p90", needs="a checkpoint"),
                of("Free disk space", "penstock_disk_free_ratio"),
                of("Answers of the stores that were errors", "penstock_store_errors_total"),
                of("NATS's store, used", "penstock_nats_store_used_bytes"),
                of("NATS's store, limit", "penstock_nats_store_limit_bytes", needs="a limit of the account"),
                of("Days until a certificate ends", "penstock_certificate_expiry_timestamp_seconds", expr="(penstock_certificate_expiry_timestamp_seconds - time()) / 86400", legend="{{role}} {{worker}} {{file}}", unit="d", needs="TLS"),
                of("Spans of traces", "penstock_trace_spans_total", needs="traces"),
            ),
        ),
    ),
)  # fmt: skip

DASHBOARDS = (OVERVIEW, ROLLOUT, TRAINER, REWARD, STORAGE)
