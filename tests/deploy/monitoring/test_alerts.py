"""Every alert: it fires in the state that it is for, not in a healthy one, and says what to do."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from tests.alert_rules import rules
from tests.servers import require_package

from penstock.deploy.monitoring.alerts import ALERTS, Alert
from penstock.protocol.metrics.table import METRICS

ROOT = Path(__file__).parents[3]
TARGET = 'job="penstock-rollout", instance="h:1"'
WHO = f'role="rollout", worker="w0", {TARGET}'
STAMP = "penstock_trainer_last_{}_timestamp_seconds"

Series = dict[str, str]  # a series of promtool -> its values, one a minute
# What promtool writes: 0x9 is a 0 and nine more; 0+6x9 rises by 6. The clock of a test starts at 0.


def info(role: str, worker: str, values: str) -> Series:
    return {f'penstock_service_info{{role="{role}", worker="{worker}", run="r", version="1"}}': values}


def step_seconds(total: str, count: str) -> Series:
    return {
        'penstock_trainer_step_seconds_sum{phase="train"}': total,
        'penstock_trainer_step_seconds_count{phase="train"}': count,
    }


# alert -> series that make it fire within 130 minutes, series of a run that is well
CASES: dict[str, tuple[Series, Series]] = {
    "PenstockServiceUnreachable": ({f"up{{{TARGET}}}": "0x130"}, {f"up{{{TARGET}}}": "1x130", 'up{job="node"}': "0x130"}),
    "PenstockServiceNotBeating": (
        {f"penstock_heartbeat_timestamp_seconds{{{WHO}}}": "0x130"}, {f"penstock_heartbeat_timestamp_seconds{{{WHO}}}": "0+60x130"},
    ),
    "PenstockNoWorker": (info("trainer", "trainer", "1x130"), {**info("trainer", "trainer", "1x130"), **info("rollout", "w0", "1x130")}),
    "PenstockFewerWorkers": (
        {**info("rollout", "w0", "1x130"), **info("rollout", "w1", "1x110 stale")}, {**info("rollout", "w0", "1x130"), **info("rollout", "w1", "1x130")},
    ),
    "PenstockNoRewardService": (info("trainer", "trainer", "1x130"), {**info("trainer", "trainer", "1x130"), **info("reward", "r0", "1x130")}),
    "PenstockNoTrainer": (info("rollout", "w0", "1x130"), {**info("trainer", "trainer", "1x130"), **info("rollout", "w0", "1x130")}),
    "PenstockTrainerWithoutStep": (  # a step of 2 s; one of ten minutes, the last an hour ago
        {STAMP.format("step"): "0x130", **step_seconds("0+60x130", "0+30x130")},
        {STAMP.format("step"): "0x60 0+60x70", **step_seconds("0+600x130", "0+1x130")},
    ),
    "PenstockTrainerWithoutCheckpoint": ({STAMP.format("checkpoint"): "0x130"}, {STAMP.format("checkpoint"): "0+60x130"}),
    "PenstockWorkerOnOldWeights": (
        {'penstock_weights_version{role="trainer", worker="trainer"}': "0+1x130", f"penstock_weights_version{{{WHO}}}": "0x130"},
        {'penstock_weights_version{role="trainer", worker="trainer"}': "0+1x130", f"penstock_weights_version{{{WHO}}}": "0+1x130"},
    ),
    "PenstockGroupsDropped": (
        {'penstock_groups_total{outcome="dropped", reason="stale"}': "0+6x130", 'penstock_groups_total{outcome="trained"}': "0+6x130"},
        {'penstock_groups_total{outcome="dropped", reason="stale"}': "0+1x130", 'penstock_groups_total{outcome="trained"}': "0+6x130"},
    ),
    "PenstockStaleTokens": (
        {'penstock_trained_staleness_versions_bucket{le="4"}': "0x130", 'penstock_trained_staleness_versions_bucket{le="8"}': "0+9x130", 'penstock_trained_staleness_versions_bucket{le="+Inf"}': "0+9x130"},
        {'penstock_trained_staleness_versions_bucket{le="4"}': "0+9x130", 'penstock_trained_staleness_versions_bucket{le="8"}': "0+9x130", 'penstock_trained_staleness_versions_bucket{le="+Inf"}': "0+9x130"},
    ),
    "PenstockFewTokensCount": ({"penstock_trainer_ess_ratio": "0.4x130"}, {"penstock_trainer_ess_ratio": "0.9x130"}),
    "PenstockEngineMismatch": ({"penstock_trainer_engine_mismatch_nats": "0.08x130"}, {"penstock_trainer_engine_mismatch_nats": "0.02x130"}),
    "PenstockNothingToLearn": ({"penstock_trainer_zero_signal_groups_ratio": "1x130"}, {"penstock_trainer_zero_signal_groups_ratio": "0.5x130"}),
    "PenstockQueueGrows": (
        {'penstock_queue_pending{stream="s", consumer="c"}': "0+60x130"}, {'penstock_queue_pending{stream="s", consumer="c"}': "500x130"},
    ),
    "PenstockEndpointFails": (
        {'penstock_reward_endpoint_breaker_open{endpoint="e"}': "1x130"}, {'penstock_reward_endpoint_breaker_open{endpoint="e"}': "0x130"},
    ),
    "PenstockEndpointErrors": (
        {'penstock_reward_endpoint_errors_total{endpoint="e"}': "0+3x130", 'penstock_reward_endpoint_calls_total{endpoint="e"}': "0+9x130"},
        {'penstock_reward_endpoint_errors_total{endpoint="e"}': "0+1x130", 'penstock_reward_endpoint_calls_total{endpoint="e"}': "0+9x130"},
    ),
    "PenstockRewardsWait": (
        {'penstock_reward_groups_waited_total{reason="LeaseExpired"}': "0+6x130", "penstock_reward_completions_scored_total": "99x130"},
        {'penstock_reward_groups_waited_total{reason="LeaseExpired"}': "0+6x130", "penstock_reward_completions_scored_total": "0+60x130"},
    ),
    "PenstockGroupsDead": ({'penstock_reward_groups_dead_total{reason="broken"}': "0x125 1x5"}, {'penstock_reward_groups_dead_total{reason="broken"}': "3x130"}),
    "PenstockEngineFails": (
        {f'penstock_rollout_packs_total{{outcome="requeued", {TARGET}}}': "0+3x130", f'penstock_rollout_packs_total{{outcome="announced", {TARGET}}}': "0+6x130"},
        {f'penstock_rollout_packs_total{{outcome="requeued", {TARGET}}}': "0+1x130", f'penstock_rollout_packs_total{{outcome="announced", {TARGET}}}': "0+9x130"},
    ),
    "PenstockDiskFills": (
        {f'penstock_disk_free_ratio{{folder="worker.cache_dir", {WHO}}}': "0.09x130"}, {f'penstock_disk_free_ratio{{folder="worker.cache_dir", {WHO}}}': "0.2x130"},
    ),
    "PenstockNatsStoreFills": (
        {"penstock_nats_store_used_bytes": "90x130", "penstock_nats_store_limit_bytes": "100x130"}, {"penstock_nats_store_used_bytes": "80x130", "penstock_nats_store_limit_bytes": "100x130"},
    ),
    "PenstockStoreFull": (
        {f'penstock_store_errors_total{{store="s3", reason="full", {TARGET}}}': "0x127 3x3"},
        {f'penstock_store_errors_total{{store="s3", reason="full", {TARGET}}}': "3x130", f'penstock_store_errors_total{{store="s3", reason="error", {TARGET}}}': "0+1x130"},
    ),
    "PenstockObjectStoreFails": (
        {f'penstock_store_errors_total{{store="s3", reason="error", {TARGET}}}': "0+9x130"}, {f'penstock_store_errors_total{{store="s3", reason="error", {TARGET}}}': "0+1x130"},
    ),
    "PenstockCertificateEnds": (  # the clock begins at 0: fourteen days are 1,209,600 s
        {f'penstock_certificate_expiry_timestamp_seconds{{file="nats.ca_file", {WHO}}}': "1200000x130"}, {f'penstock_certificate_expiry_timestamp_seconds{{file="nats.ca_file", {WHO}}}': "1300000x130"},
    ),
    "PenstockTracesLost": ({'penstock_trace_spans_total{outcome="dropped"}': "0+3x130"}, {'penstock_trace_spans_total{outcome="exported"}': "0+3x130"}),
}  # fmt: skip


def firing(alert: Alert, series: Series, *, is_expected: bool) -> dict[str, object]:
    """One test of promtool: how many series of the alert's expression hold for the whole time of its `for`."""
    count = f'count(ALERTS{{alertname="{alert.name}", alertstate="firing"}})'
    return {
        "name": f"{alert.name} {'fires' if is_expected else 'does not fire'}",
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f"{count} or vector(0)",
                "eval_time": "130m",
                "exp_samples": [{"labels": "{}", "value": int(is_expected)}],
            }
        ],
    }


def test_every_alert_fires_for_its_cause_and_not_in_a_healthy_run(tmp_path: Path) -> None:
    """Promtool evaluates the rules over 130 minutes of both states of each."""
    require_package("promtool", "prometheus")
    assert set(CASES) == {alert.name for alert in ALERTS}
    files = []
    for alert in ALERTS:  # a file of rules for each: promtool evaluates all rules of a file for every test
        (tmp_path / f"{alert.name}.rules").write_text(rules((alert,)))
        ill, well = CASES[alert.name]
        tests = [firing(alert, ill, is_expected=True), firing(alert, well, is_expected=False)]
        files.append(tmp_path / f"{alert.name}.yml")
        files[-1].write_text(
            json.dumps({"rule_files": [f"{alert.name}.rules"], "evaluation_interval": "1m", "tests": tests})
        )
    checked = subprocess.run(["promtool", "test", "rules", *files], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_names_what_there_is_and_what_to_do(alert: Alert) -> None:
    """Metrics and labels are in the table, and the page that it links to has that heading."""
    names = re.findall(r"penstock_\w+", alert.expr)
    metrics = [METRICS.get(name) or METRICS[re.sub("_(bucket|sum|count)$", "", name)] for name in names]
    assert metrics or "up{" in alert.expr
    known = {label for metric in metrics for label in metric.labels} | {"job", "instance", "run", "le"}
    shown = set(re.findall(r"\$labels\.(\w+)", alert.summary))
    selected = set(re.findall(r"[{,]\s*(\w+)\s*[=!]", alert.expr))
    assert shown | selected <= known
    assert all(text.endswith(".") for text in (alert.summary, alert.cause, alert.cure))
    path, _, anchor = alert.page.partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / path).read_text(), re.MULTILINE)
    slugs = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    assert not anchor or anchor in slugs, sorted(slugs)
