"""A whole run on hosts of its own while the network and the processes fail; then the account, and a replay. `make cluster-test`.

    python -m tests.rigs.cluster.run --faults 60 --hold-s 10              # root; `ip`, /dev/net/tun; the clocks need a C compiler
    python -m tests.rigs.cluster.run --faults 300 --hold-s 5              # the whole: an hour
    python -m tests.rigs.cluster.run --kinds NATS-NATS "kill two NATS servers" --faults 8

Three NATS servers with three replicas of every stream, S3, trainer, reward service and two workers have a network namespace and an
address each (`network.py`), TLS and the logins of their roles. Faults of all kinds come one after the other: each
holds for ``--hold-s`` seconds (the first partition of each kind for ``--long-s``), is healed, and its victim must be productive
again within 30 s. At the end the trainer is stopped,

1. `penstock audit` must balance: every group issued was trained once, dropped once with a reason, or waits in a queue;
2. the replay of the record must give every version's hash.

Exits with 1 if one does not hold, or a recovery took longer.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.rigs.chaos.kills import Observer
from tests.rigs.cluster.network import (
    GUEST,
    HOSTS,
    KILLS,
    KINDS,
    S3,
    SKEW_S,
    SKEWS,
    TRAINER,
    Fault,
    Network,
    links,
    plan,
)
from tests.rigs.cluster.stack import Stack
from tests.small_run import report_of, write_small_run

from penstock.deploy.processes.child import DeployError, adopt_orphans, wait_until
from penstock.deploy.processes.servers import NatsServer
from penstock.protocol import logs
from penstock.protocol.errors import BusError
from penstock.protocol.transport.bus import Bus

_PRODUCTIVE_S = 30.0
_GIVE_UP_S = 180.0  # without progress
_STOP_S = 120.0
_FIRST_STEPS = 3
_RUN_ID = "cluster"


@dataclass(slots=True)
class Outcome:
    kind: str
    victim: str
    held_s: float
    steps_meanwhile: int
    productive_s: float | None = None  # from the healing; None: not within three minutes


@dataclass(slots=True)
class Result:
    seed: int
    hold_s: float
    long_s: float
    faults: list[Outcome] = field(default_factory=list)
    steps: int = 0
    wall_s: float = 0.0
    audit: dict[str, Any] = field(default_factory=dict)
    replayed: int = 0
    failures: list[str] = field(default_factory=list)


class ClusterRun:
    def __init__(self, stack: Stack, bus: Bus, observer: Observer, result: Result, pause_s: float) -> None:
        self.stack, self.bus, self.observer, self.result = stack, bus, observer, result
        self._pause_s = pause_s

    def inject(self, fault: Fault) -> None:
        """Make a fault, hold it, heal it, and wait until its victim works again."""
        before, began = self._num_steps, time.time()
        heal = self._begin(fault)
        if fault.kind not in KILLS:
            time.sleep(self.result.long_s if fault.is_long else self.result.hold_s)
        heal()
        healed = time.time()
        outcome = Outcome(fault.kind, fault.victim, healed - began, self._num_steps - before)
        if wait_until(lambda: self._productive_at(fault, healed) is not None, _GIVE_UP_S, 0.1):
            outcome.productive_s = round((self._productive_at(fault, healed) or 0.0) - healed, 1)
        self.result.faults.append(outcome)
        said = "never" if outcome.productive_s is None else f"{outcome.productive_s:.1f} s"
        print(
            f"{len(self.result.faults):4} {fault.kind} ({fault.victim}), held {outcome.held_s:.0f} s, "
            f"{outcome.steps_meanwhile} steps meanwhile; productive after {said}",
            flush=True,
        )
        if outcome.productive_s is None or outcome.productive_s > _PRODUCTIVE_S:
            self.result.failures.append(f"{fault.kind} ({fault.victim}): productive after {said}")
        if self.stack.supervisor.failure is not None:
            raise self.stack.supervisor.failure
        time.sleep(self._pause_s)

    def _begin(self, fault: Fault) -> Callable[[], object]:
        stack = self.stack
        if fault.kind in SKEWS:
            stack.set_clock(fault.victim, SKEW_S if "+" in fault.kind else -SKEW_S)
            return lambda: stack.set_clock(fault.victim, 0)
        if fault.kind in KILLS:
            for victim in self._killed(fault):
                stack.kill(victim)
            return lambda: None
        if fault.kind == "a worker joins and leaves":
            joined, child = time.time(), stack.worker(GUEST)
            if not wait_until(lambda: self.observer.seen.productive_at(GUEST, joined), _GIVE_UP_S, 0.1):
                self.result.failures.append(f"{GUEST} joined and announced nothing within {_GIVE_UP_S:.0f} s")
            return lambda: child.stop(60.0)
        stack.network.set(links(fault))
        return lambda: stack.network.set({})

    def _killed(self, fault: Fault) -> Sequence[str]:
        if fault.kind == "kill the NATS leader":
            return [self.stack.leader(self.bus, f"{_RUN_ID}-generated")]
        if fault.kind == "kill two NATS servers":
            return [fault.victim, fault.others[0]]
        return [fault.victim]

    def _productive_at(self, fault: Fault, since: float) -> float | None:
        """Return when the victim worked, and a step was made, after a time; servers are used by workers."""
        seen = self.observer.seen
        steps = [at for at, _ in list(seen.steps) if at > since]
        victim = fault.victim if fault.victim in HOSTS and fault.victim not in (S3, GUEST) else NatsServer.name
        worked = seen.productive_at(NatsServer.name if victim.startswith("nats") else victim, since)
        return None if worked is None or not steps else max(worked, steps[0])

    @property
    def _num_steps(self) -> int:
        return self.observer.seen.newest_step


def go(
    folder: Path, *, result: Result, num_faults: int, pause_s: float, kinds: Sequence[str], minutes: float
) -> Result:
    """Run, and check the account and the replay; returns the ``result`` with what was found."""
    seed, started = result.seed, time.monotonic()
    run_file = write_small_run(
        folder,
        _RUN_ID,
        seed=seed,
        num_train=4096,
        rollout={"groups_per_step": 8, "groups_per_message": 2, "max_staleness": 2},
        trainer={"steps": 1_000_000, "checkpoint_every": 5},
    )
    os.chdir(folder)
    skews = bool(set(kinds) & set(SKEWS))
    with Network(HOSTS) as network, Stack(folder, network, run_file, skews=skews) as stack:
        with (
            Bus.connect(stack.login("viewer"), name="observer") as bus,
            Bus.connect(stack.login("admin"), name="admin") as admin,
            Observer(_RUN_ID, bus, own_clock=True) as observer,
        ):
            run = ClusterRun(stack, admin, observer, result, pause_s)
            if not wait_until(lambda: observer.seen.newest_step >= _FIRST_STEPS, 2 * _GIVE_UP_S, 0.1):
                raise DeployError(f"no {_FIRST_STEPS} steps within {2 * _GIVE_UP_S:.0f} s; logs: {folder}/logs")
            for fault in plan(seed, num_faults, kinds):
                if (time.monotonic() - started) / 60 > minutes:
                    break
                run.inject(fault)
            _stop_trainer(stack)
            result.steps = observer.seen.newest_step
        _check(stack, result)
    result.wall_s = round(time.monotonic() - started, 1)
    return result


def _stop_trainer(stack: Stack) -> None:
    trainer = stack.supervisor.child(TRAINER)
    stack.supervisor.close()
    trainer.ask_to_stop()
    trainer.wait(_STOP_S)


def _check(stack: Stack, result: Result) -> None:
    """Audit and replay with the login of a viewer; add what does not hold."""
    for verb in ("audit", "replay"):
        report = report_of(verb, _RUN_ID, stack.folder / "runs", stack.environment("viewer"))
        if verb == "audit":
            result.audit = report
        else:
            result.replayed = len(report.get("same", []))
        if report["exit_code"]:
            result.failures.append(f"{verb}: exit code {report['exit_code']}: {json.dumps(report)[-600:]}")


def table(faults: Sequence[Outcome]) -> str:
    by_kind: dict[str, list[Outcome]] = defaultdict(list)
    for fault in faults:
        by_kind[fault.kind].append(fault)
    rows = [
        "| fault | number | held s | steps meanwhile | productive again s: median, worst |",
        "|---|---|---|---|---|",
    ]
    for kind in (kind for kind in KINDS if kind in by_kind):
        found = by_kind[kind]
        known = [one.productive_s for one in found if one.productive_s is not None]
        times = (
            f"{statistics.median(known):.1f}, {max(known):.1f}" if len(known) == len(found) else "never, in one case"
        )
        held = statistics.median(one.held_s for one in found)
        rows.append(f"| {kind} | {len(found)} | {held:.0f} | {sum(one.steps_meanwhile for one in found)} | {times} |")
    return "\n".join(rows)


def show(result: Result) -> str:
    train = (result.audit.get("splits") or [{}])[0]
    return (
        f"{table(result.faults)}\n\nseed {result.seed}: {len(result.faults)} faults, {result.steps} steps, {result.wall_s:.0f} s; "
        f"groups: {train.get('issued')} issued, {train.get('used')} trained, dropped {train.get('dropped')}, dead letters "
        f"{train.get('dead')}, in flight {train.get('in_flight')}; {result.replayed} versions replayed with the same hash\n"
        + "; ".join(["FAILS", *result.failures] if result.failures else ["holds"])
    )


def main() -> int:
    """Run the faults; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=60, help="number of faults, of all kinds equally often")
    parser.add_argument(
        "--hold-s", type=float, default=10.0, help="how long a partition, a slow link or a wrong clock lasts"
    )
    parser.add_argument("--long-s", type=float, default=60.0, help="how long the first partition of each kind lasts")
    parser.add_argument("--pause-s", type=float, default=1.0, help="between a recovery and the next fault")
    parser.add_argument("--minutes", type=float, default=1e9, help="no further fault after this time")
    kinds = ", ".join(KINDS).replace("%", "%%")
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help=f"only these of {kinds}"
    )
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    parser.add_argument("--keep", type=Path, help="keep the run's folder here")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the namespaces are removed then, too
    logs.configure("cluster", level="error")
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="cluster-") as scratch:
        folder = (options.keep or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            result = go(
                folder, result=Result(options.seed, options.hold_s, options.long_s), num_faults=options.faults,
                pause_s=options.pause_s, kinds=options.kinds, minutes=options.minutes,
            )  # fmt: skip
        except (DeployError, BusError) as err:
            print(f"cluster: {err}", file=sys.stderr)
            return 1
        if options.json:
            options.json.write_text(json.dumps(asdict(result), indent=1))
    print(show(result), flush=True)
    return int(bool(result.failures))


if __name__ == "__main__":
    sys.exit(main())
