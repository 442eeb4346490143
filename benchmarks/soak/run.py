"""Run at full speed for a long time and show what grows: memory of every process, bytes on disk by kind.

    make soak                                     # an hour
    make soak SOAK_S=900
    python -m benchmarks.soak --seconds 900 --json soak.json

One run of the quickstart's services on its tiny model, which trains several steps a second and never ends by itself.
`[retention]` and `trainer.weights_grace_s` are a twelfth of the time, so that what they bound is bounded within the run. The first third is the warm-up.
Exits with 1 when the memory of a process, or a kind of bytes on disk that is bounded, grows after it (`verdict.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.soak.measure import Sample, take
from benchmarks.soak.verdict import judge, show

from penstock.console.live.panel import LivePanel
from penstock.deploy import quickstart_task
from penstock.deploy.local_run import TRAINER, LocalRun
from penstock.deploy.processes.child import DeployError
from penstock.protocol import logs
from penstock.protocol.transport.bus import Bus

_NUM_PROMPTS = 20_000
_START_S = 300.0
_SAMPLES = 240  # over the whole run
_RETENTION_SHARE = 1 / 12

_RUN_FILE = """\
run = {{ id = "soak", dir = "{folder}/runs", seed = 0 }}
model = {{ path = "{folder}/model" }}
reward = {{ name = "exact_match" }}
eval = {{ every = 100, at_start = false }}
retention = {{ trained_packs_h = {hours}, unused_packs_h = 1.0 }}

[data]
train = "{folder}/data/train.jsonl"
eval = "{folder}/data/eval.jsonl"
max_prompt_tokens = 32

[rollout]
groups_per_step = 24
group_size = 8
groups_per_message = 6
max_staleness = 2
max_new_tokens = {max_new_tokens}

[trainer]
steps = 10000000
lr = 5e-4
checkpoint_every = 10
weights_grace_s = {grace_s}
"""


def soak(folder: Path, seconds: float, overrides: Sequence[str] = ()) -> list[Sample]:
    """Run for so long after the first step; return the samples. Raises DeployError when the run ends before."""
    quickstart_task.write_data(folder / "data", seed=0, num_sft=1, num_train=_NUM_PROMPTS, num_eval=24)
    quickstart_task.write_model(folder / "model", seed=0)
    run_file = folder / "run.toml"
    kept_s = seconds * _RETENTION_SHARE
    text = _RUN_FILE.format(
        folder=folder, hours=kept_s / 3600, grace_s=kept_s, max_new_tokens=quickstart_task.MAX_NEW_TOKENS
    )
    run_file.write_text(text)
    samples = []
    with LocalRun([str(run_file), *overrides]) as run:
        run.start()
        with Bus.connect(run.nats, name="soak") as bus, LivePanel(run.run_id, bus, mode="quiet") as panel:
            if not panel.wait(lambda snapshot: snapshot.step > 0, deadline_s=_START_S):
                raise DeployError(f"no step within {_START_S:.0f} s\n{run.log_tail(TRAINER)}")
            started = time.monotonic()
            while time.monotonic() - started < seconds:
                if run.wait(seconds / _SAMPLES) is not None:
                    raise DeployError(f"the trainer ended\n{run.log_tail(TRAINER)}")
                samples.append(take(started, panel.snapshot(), run.processes(), run.folder))
    return samples


def main() -> int:
    """Run, print the table, return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--json", type=Path, help="also write every sample to this file")
    parser.add_argument("--keep", type=Path, help="keep the run's folder here")
    parser.add_argument("overrides", nargs="*", help="section.key=value for all services")
    options = parser.parse_args()
    logs.configure("soak", level="error")
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        folder = (options.keep or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        samples = soak(folder, options.seconds, options.overrides)
    if options.json:
        options.json.write_text(json.dumps([asdict(sample) for sample in samples]))
    print(f"machine: {os.cpu_count()} cores, Python {platform.python_version()}, load {os.getloadavg()[2]:.1f}\n")
    lines = judge(samples)
    print(show(samples, lines))
    return 1 if any(line.grows for line in lines) else 0
