"""The alerts of Prometheus, as a table: what is wrong, why it usually is, and what to do. `dashboards` writes ``rules.yml``.

Limits are those of docs/metrics.md where that page has one. An expression names metrics of the table only, and ``up``, which
Prometheus writes for each target.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

_INFO = "penstock_service_info"
_JOBS = '{job=~"penstock.*"}'


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert; ``wait`` is how long the expression must hold, in Prometheus' words, empty for at once."""

    name: str
    severity: Literal["page", "warning"]  # page: work has stopped, or soon will
    expr: str
    wait: str
    summary: str
    cause: str
    cure: str
    page: str  # of the documentation, for more


def _without(role: str, other: str) -> str:
    return f'count by (run) ({_INFO}{{role="{role}"}}) unless on (run) count by (run) ({_INFO}{{role="{other}"}})'


ALERTS: tuple[Alert, ...] = (
    Alert(
        "PenstockServiceUnreachable", "warning", f"up{_JOBS} == 0", "1m",
        "{{ $labels.job }} at {{ $labels.instance }} has not answered Prometheus for a minute.",
        "The process was killed or hangs, or a firewall is between it and Prometheus.",
        "Read the end of its log; penstock watch RUN --plain says whether its heartbeat goes on.",
        "docs/guides/several_machines.md#what-may-be-stopped",
    ),
    Alert(
        "PenstockServiceNotBeating", "warning", "time() - penstock_heartbeat_timestamp_seconds > 60", "",
        "{{ $labels.role }} {{ $labels.worker }} has not beaten for a minute, but answers.",
        "It cannot reach NATS, or its main thread is stuck.",
        "penstock doctor on its machine checks NATS and S3; a service that is stuck is restarted.",
        "docs/troubleshooting.md#running",
    ),
    Alert(
        "PenstockNoWorker", "page", _without("trainer", "rollout"), "5m",
        "Run {{ $labels.run }} has had no rollout worker for five minutes: nothing is generated.",
        "All workers exited, or their metrics are off (metrics.rollout_port).",
        "Start one: penstock rollout run.toml. What was under way is delivered to it.",
        "docs/guides/several_machines.md#what-may-be-stopped",
    ),
    Alert(
        "PenstockFewerWorkers", "warning",
        f'count by (run) ({_INFO}{{role="rollout"}}) <= 0.5 * max_over_time((count by (run) ({_INFO}{{role="rollout"}}))[30m:1m])', "1m",
        "Half of the workers that run {{ $labels.run }} had in the last half hour are gone.",
        "Machines were taken away, engines crashed, or the fleet was made smaller on purpose.",
        "penstock watch RUN --plain lists the workers; read the logs of those that are missing.",
        "docs/guides/several_machines.md#what-may-be-stopped",
    ),
    Alert(
        "PenstockNoRewardService", "page", _without("trainer", "reward"), "2m",
        "Run {{ $labels.run }} has no reward service: groups wait in their queue.",
        "It exited or hangs, or Prometheus may not read its API (a token of the role read).",
        "Start one: penstock reward service run.toml. Nothing that waits is lost.",
        "docs/guides/several_machines.md#what-may-be-stopped",
    ),
    Alert(
        "PenstockNoTrainer", "page", _without("rollout", "trainer"), "5m",
        "Run {{ $labels.run }} has had workers and no trainer for five minutes.",
        "The trainer ended with an error, or the run is finished and its workers still hold their machines.",
        "penstock runs says which. Resume it with the same command, or stop the workers.",
        "docs/guides/several_machines.md#what-may-be-stopped",
    ),
    Alert(
        "PenstockTrainerWithoutStep", "page",
        "time() - penstock_trainer_last_step_timestamp_seconds > clamp_min("
        '10 * sum without (phase) (penstock_trainer_step_seconds_sum{phase=~"wait|train"})'
        ' / sum without (phase) (penstock_trainer_step_seconds_count{phase="train"}), 300)',
        "",
        "No optimizer step for ten times as long as a step takes, and for five minutes at least.",
        "Workers or rewards stopped, or NATS or S3 is unreachable. After trainer.collect_deadline_s (ten minutes) the trainer ends.",
        "penstock watch RUN --plain shows what each service waits for, with the depth of each queue.",
        "docs/troubleshooting.md#running",
    ),
    Alert(
        "PenstockTrainerWithoutCheckpoint", "warning", "time() - penstock_trainer_last_checkpoint_timestamp_seconds > 7200", "",
        "No checkpoint for two hours: as much would be trained again after a crash.",
        "trainer.checkpoint_every_s is longer, or writing one fails or does not end.",
        "Lower trainer.checkpoint_every_s; look for the checkpoint in the trainer's log and for free disk space.",
        "docs/troubleshooting.md#states-that-are-not-errors",
    ),
    Alert(
        "PenstockWorkerOnOldWeights", "warning",
        'max by (run) (penstock_weights_version{role="trainer"}) - on (run) group_right () penstock_weights_version{role="rollout"} > 10', "5m",
        "Worker {{ $labels.worker }} serves weights that are more than ten versions old.",
        "It cannot read them from S3, its cache has no space, or its engine refuses them.",
        "Its log names the version that it could not apply, and why; restart it when the engine is stuck.",
        "docs/sglang.md",
    ),
    Alert(
        "PenstockGroupsDropped", "warning",
        'sum by (run) (rate(penstock_groups_total{outcome="dropped"}[10m])) > 0.5 * sum by (run) (rate(penstock_groups_total{outcome="trained"}[10m]))', "10m",
        "More than one group is dropped for two that are trained.",
        "As stale: too many workers for this trainer. As dead: the reward fails. As duplicate: workers are killed or slow.",
        "The dashboard of the trainer shows the reasons; fewer workers or a larger rollout.max_staleness against stale ones.",
        "docs/troubleshooting.md#states-that-are-not-errors",
    ),
    Alert(
        "PenstockStaleTokens", "warning", "histogram_quantile(0.9, sum by (run, le) (rate(penstock_trained_staleness_versions_bucket[10m]))) > 4", "10m",
        "A tenth of the trained tokens is more than four versions old.",
        "Generation is slow against the trainer, or queues are long.",
        "Fewer groups ahead (rollout.max_staleness), more workers, or shorter completions.",
        "docs/metrics.md#healthy-ranges",
    ),
    Alert(
        "PenstockFewTokensCount", "warning", "penstock_trainer_ess_ratio < 0.5", "10m",
        "The effective sample size is below half: few tokens decide the step.",
        "Samples are old, or engine and trainer compute other log-probabilities.",
        "Lower rollout.max_staleness or trainer.lr; compare with the panel of the engine's mismatch.",
        "docs/metrics.md#healthy-ranges",
    ),
    Alert(
        "PenstockEngineMismatch", "warning", "penstock_trainer_engine_mismatch_nats > 0.05", "5m",
        "Engine and trainer disagree about the log-probabilities of the same tokens; at trainer.max_mismatch the run stops.",
        "Other weights, another precision or sampling setting, or a kernel of the engine.",
        "Compare precision and settings of both; restart the workers, which load the weights again.",
        "docs/sglang.md#when-an-engines-weights-are-trusted",
    ),
    Alert(
        "PenstockNothingToLearn", "warning", "penstock_trainer_zero_signal_groups_ratio > 0.9", "15m",
        "In nine of ten groups all rewards are equal: they teach nothing.",
        "The task is solved or far too hard, or the reward reads another form than the answers have.",
        "penstock reward test NAME --data FILE shows the rewards; other prompts, or a larger rollout.group_size.",
        "docs/metrics.md#symptom-cause-cure",
    ),
    Alert(
        "PenstockQueueGrows", "warning", "deriv(penstock_queue_pending[15m]) > 0.1 and penstock_queue_pending > 100", "15m",
        "{{ $labels.consumer }} does not keep up with {{ $labels.stream }}.",
        "Its readers are slow, too few, or fail and get the same messages again.",
        "Start more of them (a queue of generated groups: reward services); look for redelivered messages.",
        "docs/troubleshooting.md#states-that-are-not-errors",
    ),
    Alert(
        "PenstockEndpointFails", "page", "penstock_reward_endpoint_breaker_open == 1", "2m",
        "The circuit breaker of endpoint {{ $labels.endpoint }} is open: its groups wait.",
        "The endpoint is down, too slow, or answers with errors.",
        "penstock reward errors RUN has its answers. It is asked again by itself; nothing is scored 0 meanwhile.",
        "docs/troubleshooting.md#rewards",
    ),
    Alert(
        "PenstockEndpointErrors", "warning",
        "sum by (endpoint) (rate(penstock_reward_endpoint_errors_total[5m])) > 0.2 * sum by (endpoint) (rate(penstock_reward_endpoint_calls_total[5m]))", "5m",
        "More than a fifth of the calls of endpoint {{ $labels.endpoint }} fails.",
        "It is overloaded, or some answers cannot be scored.",
        "penstock reward errors RUN groups them by reason; lower the endpoint's concurrency if it is overloaded.",
        "docs/troubleshooting.md#rewards",
    ),
    Alert(
        "PenstockRewardsWait", "page",
        "sum by (run, reason) (rate(penstock_reward_groups_waited_total[5m])) > on (run) group_left () sum by (run) (rate(penstock_reward_completions_scored_total[5m]))", "1m",
        "Groups go back into their queue without a reward, and hardly any is scored: {{ $labels.reason }}.",
        "The endpoint hangs or was stopped (LeaseExpired), fails (EndpointFailed), or no such reward is registered.",
        "Start the endpoint again; penstock reward list shows which are registered. The groups are scored then, none is lost.",
        "docs/troubleshooting.md#rewards",
    ),
    Alert(
        "PenstockGroupsDead", "warning", "increase(penstock_reward_groups_dead_total[15m]) > 0", "",
        "Groups are dead-lettered: {{ $labels.reason }}.",
        "The reward failed on them for good: an error of its own, or an invalid answer.",
        "penstock dead-letters list RUN has cause and group; correct it, then penstock dead-letters resend RUN.",
        "docs/troubleshooting.md#rewards",
    ),
    Alert(
        "PenstockEngineFails", "warning",
        'sum by (job, instance) (rate(penstock_rollout_packs_total{outcome="requeued"}[10m])) > 0.2 * sum by (job, instance) (rate(penstock_rollout_packs_total[10m]))', "5m",
        "The engine of {{ $labels.instance }} fails more than a fifth of its packs.",
        "The engine is out of memory, crashes, or its weights were not known after an update.",
        "Its log and the worker's name the failure; fewer concurrent sequences, or a restart.",
        "docs/sglang.md",
    ),
    Alert(
        "PenstockDiskFills", "page", "penstock_disk_free_ratio < 0.1", "1m",
        "Less than a tenth of the disk of {{ $labels.folder }} of {{ $labels.role }} {{ $labels.worker }} is free.",
        "Checkpoints, cached weights, logs, or something else on the same disk.",
        "Free space, or lower trainer.keep_checkpoints. A full disk ends the trainer; a worker waits.",
        "docs/troubleshooting.md#running",
    ),
    Alert(
        "PenstockNatsStoreFills", "page", "penstock_nats_store_used_bytes > 0.85 * penstock_nats_store_limit_bytes", "1m",
        "The streams of all runs hold more than 85 % of what NATS may store.",
        "Finished runs that were not removed, or queues without a reader.",
        "penstock runs rm RUN removes a finished run; or raise max_file and max_file_store in nats.conf, on a disk that has the space.",
        "docs/operations.md#when-the-disk-is-full",
    ),
    Alert(
        "PenstockStoreFull", "page", 'sum by (store) (increase(penstock_store_errors_total{reason="full"}[5m])) > 0', "",
        "{{ $labels.store }} refuses writes: it has no space left.",
        "The disk, the account, or one key-value bucket is full; the services' logs name it.",
        "Free space or raise the limit that the log names. Writes are repeated meanwhile; a trainer ends after two minutes, and resumes.",
        "docs/operations.md#when-the-disk-is-full",
    ),
    Alert(
        "PenstockObjectStoreFails", "warning", 'sum by (job) (rate(penstock_store_errors_total{store="s3",reason="error"}[5m])) > 0.05', "5m",
        "The object store answers requests of {{ $labels.job }} with errors.",
        "It is overloaded, its disk is full (rclone says no more than \"InternalError\"), or a clock is wrong.",
        "Read the object store's own log, and the service's; penstock doctor checks both clocks.",
        "docs/operations.md#when-the-disk-is-full",
    ),
    Alert(
        "PenstockCertificateEnds", "warning", "penstock_certificate_expiry_timestamp_seconds - time() < 14 * 86400", "",
        "A certificate that {{ $labels.role }} {{ $labels.worker }} uses, {{ $labels.file }}, ends within two weeks.",
        "It was not renewed, or the service still has the one that it read at its start.",
        "penstock certs FOLDER --renew (or make_secrets again), copy the files, and restart the service and its server.",
        "docs/operations.md#certificates-that-end",
    ),
    Alert(
        "PenstockTracesLost", "warning", 'rate(penstock_trace_spans_total{outcome!="exported"}[10m]) > 0', "10m",
        "Spans are not exported.",
        "The collector is unreachable or too slow.",
        "Check OTEL_EXPORTER_OTLP_ENDPOINT; the run itself loses nothing.",
        "docs/monitoring.md#traces",
    ),
)  # fmt: skip


def rules(alerts: tuple[Alert, ...] = ALERTS) -> str:
    lines = [
        "# Alerts on Penstock's metrics. Generated by `python -P -m penstock.deploy.monitoring.dashboards` from alerts.py.",
        "groups:",
        "  - name: penstock",
        "    rules:",
    ]
    for alert in alerts:
        lines += [f"      - alert: {alert.name}", f"        expr: {json.dumps(alert.expr)}"]
        lines += [f"        for: {alert.wait}"] if alert.wait else []
        lines += [
            f"        labels: {{severity: {alert.severity}}}",
            "        annotations:",
            *(f"          {name}: {json.dumps(getattr(alert, name))}" for name in ("summary", "cause", "cure", "page")),
        ]
    return "\n".join(lines) + "\n"
