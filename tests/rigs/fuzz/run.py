"""Attack a whole run with the login of every role while its processes are killed, and prove what it withstood.

    make fuzz-ring FUZZ_S=600
    python -m tests.rigs.fuzz.run --seconds 120 --seed 3 --without pack-schema pack-values
    python -m tests.rigs.fuzz.run --only lies --seconds 60          # one class of attacks
    python -m tests.rigs.fuzz.run --with plausible rewards          # what a stolen login can do; expected to fail
    python -m tests.rigs.fuzz.run --send findings/seed0-1.jsonl     # send recorded attacks again, to a new run
    python -m tests.rigs.fuzz.run --classes                         # what there is

A real run of the quickstart's services (tiny model, two workers with embedded engines, reward service, HTTP endpoint,
trainer) on a real nats-server with the run's generated rights and a real S3 server. `attacks.py` lists what is sent,
`kills` are SIGKILLs of all of them. After the time the attacks stop, the run goes on for some steps, its trainer
is asked to stop, and `judge.py` recomputes what was trained. The command fails unless

1. no process ended by itself: none exited but by a SIGKILL of this command, and all run at the end;
2. nothing foreign was trained: prompt, size, text, rewards and log-probabilities of every trained group are those of
   its task and of the version that it names, within 1e-5 nats;
3. the audit closes: every group that was issued was trained once, dropped once with a reason, or is in flight;
4. a replay of the record reproduces every version with the same hash;
5. the server refused everything outside a role's rights, and the run made steps under attack and after it.

A process that ends by itself is a finding: its name, the end of its log, and the attacks that its queue held at that
moment are written to ``findings``. If that ends the run, the next begins with the next seed until the time is over.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.deploy.nats_roles import RunOfRoles
from tests.rigs.chaos.run import REWARD_FILE, VICTIMS
from tests.rigs.fuzz.attack import Attack, Attacker
from tests.rigs.fuzz.attacks import CLASSES, NOT_DEFENDED, makers
from tests.rigs.fuzz.capture import Corpus
from tests.rigs.fuzz.judge import Evidence, Judge, announcements, remove_undecodable
from tests.rigs.fuzz.report import Finding, Outcome, Recorded, as_line, from_line, show
from tests.rigs.fuzz.sender import RULE, Sender, Servers
from tests.small_run import report_of, write_small_run

from penstock.deploy.local import connection_environment
from penstock.deploy.local_run import REWARD, TRAINER
from penstock.deploy.processes.child import DeployError
from penstock.deploy.processes.servers import NatsServer, S3Server
from penstock.deploy.processes.supervise import ProcessEvent
from penstock.forensics.audit.audit_checks import check_record
from penstock.forensics.audit.audit_inputs import gather
from penstock.protocol import logs, streams
from penstock.protocol.errors import PenstockError
from penstock.protocol.record.checkpoint_state import committed
from penstock.protocol.record.lineage import chapters
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus

GROUPS_PER_STEP = 8
GROUP_SIZE = 4
_FIRST_STEP_S = 240.0
_CALM_S = 90.0  # for the steps after the attack
_CALM_STEPS = 3
_STOP_S = 90.0
_OWN_KILL_S = 5.0  # a process that this command killed is reported within this time
_LEAST_ROUND_S = 30.0
_STOPPED = (0, 128 + signal.SIGTERM)  # exit codes of a trainer that was asked to stop


class FuzzRun:
    def __init__(self, folder: Path, *, seed: int, kinds: set[str], options: argparse.Namespace) -> None:
        self.folder, self.seed, self.kinds, self.options = folder, seed, kinds, options
        self.run_id = f"fuzz-{seed}"
        self.outcome = Outcome(seed, sorted(kinds))
        self._killed: dict[str, float] = {}
        self._events: list[ProcessEvent] = []
        self._rng = random.Random(f"kills {seed}")
        adapters = {"lora": {"rank": 4}} if options.lora else {}
        self.run_file = write_small_run(
            folder,
            self.run_id,
            seed=seed,
            num_train=20_000,
            model=adapters,
            reward={"name": REWARD_FILE.stem},
            eval={"every": 20, "at_start": False, "at_end": False},
            rollout={
                "groups_per_step": GROUPS_PER_STEP,
                "group_size": GROUP_SIZE,
                "groups_per_message": 2,
                "max_staleness": 4,
            },
            trainer={"steps": 100_000, "lease_s": 3, "checkpoint_every": 3, "keep_versions": 100_000},
        )

    def go(self, seconds: float, recorded: Sequence[Attack] = ()) -> Outcome:
        started = time.monotonic()
        with Servers(self.folder, self.run_id, self._on_event) as servers:
            run = RunOfRoles(
                [str(self.run_file)], servers.nats, servers.s3.settings, reward_files=[REWARD_FILE], rule=RULE
            )
            corpus, blobs = Corpus(self.run_id), Blobs(servers.s3.settings, deadline_s=20.0)
            attacker: Any = Recorded(recorded) if recorded else Attacker(corpus, blobs, makers(self.kinds), self.seed)
            with run:
                run.listen(self._on_event)
                run.start_services()
                with (
                    Bus.connect(servers.nats.login("admin"), name="fuzz") as bus,
                    Sender(
                        attacker, corpus, servers.nats, blobs, rate=self.options.rate, most_waiting=self.options.depth
                    ) as sender,
                ):
                    self._sender, self._bus, self._blobs = sender, bus, blobs
                    self._admin = servers.nats.login("admin")
                    run.start_trainer()
                    self._wait(run, lambda: corpus.newest_step >= 1, _FIRST_STEP_S)
                    self.outcome.started_s = round(time.monotonic() - started, 1)
                    first, began = corpus.newest_step, time.monotonic()
                    if corpus.newest_step:
                        sender.attacks_on.set()
                        self._attack(run, servers, began + seconds)
                        sender.attacks_on.clear()
                    self.outcome.attack_s = round(time.monotonic() - began, 1)
                    self.outcome.steps_under_attack = corpus.newest_step - first
                    calm = corpus.newest_step
                    if not self._is_over(run):
                        self._wait(run, lambda: corpus.newest_step >= calm + _CALM_STEPS, _CALM_S)
                        self.outcome.steps_after = corpus.newest_step - calm
                        if self.outcome.steps_after == 0:
                            self._find("no step after the attack", TRAINER, run.log_tail(TRAINER))
                        self._stop_trainer(run)
                    self.outcome.alive = {view.name: view.alive for view in run.processes()}
                    self._judge(run, corpus, blobs, bus, sender)
        self.outcome.replay = self._replay(servers) if not self.options.no_replay else {}
        self.outcome.wall_s = round(time.monotonic() - started, 1)
        return self.outcome

    # ── attack ────────────────────────────────────────────────────────────────────────────────

    def _attack(self, run: RunOfRoles, servers: Servers, end: float) -> None:
        next_kill = time.monotonic() + self.options.kill_every
        next_line = time.monotonic() + 15.0
        while time.monotonic() < end and not self._is_over(run):
            time.sleep(0.2)
            if self.options.kill_every > 0 and time.monotonic() > next_kill:
                self._kill(run, servers, self._rng.choice(VICTIMS))
                next_kill = time.monotonic() + self.options.kill_every * self._rng.uniform(0.5, 1.5)
            if time.monotonic() > next_line:
                print(
                    f"  {self._sender.num_sent} attacks sent, {len(self.outcome.findings)} findings",
                    file=sys.stderr,
                    flush=True,
                )
                next_line += 15.0

    def _kill(self, run: RunOfRoles, servers: Servers, victim: str) -> None:
        self._killed[victim] = time.time()
        self.outcome.kills[victim] = self.outcome.kills.get(victim, 0) + 1
        if victim in {NatsServer.name, S3Server.name}:
            servers.supervisor.child(victim).crash()
        else:
            run.kill(victim)

    def _is_over(self, run: RunOfRoles) -> bool:
        return any(e.kind in {"gave_up", "exited"} for e in self._events) or run.wait(0.0) is not None

    def _wait(self, run: RunOfRoles, condition: Callable[[], bool], deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        while not condition() and time.monotonic() < deadline and not self._is_over(run):
            time.sleep(0.1)

    def _stop_trainer(self, run: RunOfRoles) -> None:
        pid = next(view.pid for view in run.processes() if view.name == TRAINER)
        self._killed[TRAINER] = time.time() + _STOP_S
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself: a finding already
            os.kill(pid, signal.SIGTERM)
        if run.wait(_STOP_S) not in _STOPPED:
            self._find("the trainer did not stop cleanly", TRAINER, run.log_tail(TRAINER))

    # ── findings ──────────────────────────────────────────────────────────────────────────────

    def _on_event(self, event: ProcessEvent) -> None:
        """Note a process that ended by itself (on a supervisor's thread)."""
        if event.kind not in {"crashed", "exited", "gave_up"}:
            return
        self._events.append(event)
        own = event.at - self._killed.get(event.name, 0.0) < _OWN_KILL_S and event.detail in {
            "SIGKILL",
            *(f"exit code {code}" for code in _STOPPED),
        }
        if not own:
            threading.Thread(target=self._find_crash, args=(event,), daemon=True).start()

    def _find_crash(self, event: ProcessEvent) -> None:
        log = self._log(event.name)
        tail = log.read_bytes()[-12000:].decode("utf-8", "replace") if log.exists() else ""
        self._find(f"{event.name} {event.kind}: {event.detail}", event.name, tail)

    def _log(self, name: str) -> Path:
        below = self.folder if name in {NatsServer.name, S3Server.name} else self.folder / "runs" / self.run_id
        return below / "logs" / f"{name}.log"

    def _find(self, what: str, name: str, tail: str) -> None:
        suspects = self._suspects(name)
        number = len(self.outcome.findings) + 1
        path = self.options.findings / f"seed{self.seed}-{number}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(as_line(attack, self._blobs)) + "\n" for attack in suspects))
        path.with_suffix(".log").write_text(tail)
        self.outcome.findings.append(
            Finding(what, str(path), [f"{a.number} {a.kind}: {a.name}" for a in suspects[-20:]], tail[-2500:])
        )
        print(
            f"finding: {what} (seed {self.seed}, {len(suspects)} suspects in {path})\n{tail[-1500:]}",
            file=sys.stderr,
            flush=True,
        )

    def _suspects(self, name: str) -> list[Attack]:
        """Return the attacks that lie unacknowledged in the queues of a process, else the newest ones."""
        consumers = {
            "worker": [streams.tasks_consumer(self.run_id, split) for split in ("train", "eval")],
            REWARD: [streams.generated_consumer(self.run_id)],
            TRAINER: [streams.scored_consumer(self.run_id, split) for split in ("train", "eval")],
        }.get("worker" if name.startswith("worker-") else name, [])
        journal = list(self._sender.journal)
        held: set[int] = set()
        for spec in consumers:
            try:
                known = {message.sequence for message in self._bus.read_stream(spec.stream).wait()}
            except PenstockError:
                continue
            held |= {
                sent.number
                for (stream, at), sent in list(self._sender.by_sequence.items())
                if stream == spec.stream and at in known
            }
        found = [attack for attack in journal if attack.number in held]
        return found or journal[-300:]

    # ── proof ─────────────────────────────────────────────────────────────────────────────────

    def _judge(self, run: RunOfRoles, corpus: Corpus, blobs: Blobs, bus: Bus, sender: Sender) -> None:
        outcome = self.outcome
        outcome.sent, outcome.skipped = sender.num_sent, sender.num_skipped
        outcome.problems = dict(sender.problems)
        outcome.count(sender.counts)
        outcome.accepted = dict(Counter(f"{a.name}: {a.outcome}" for a in sender.accepted))
        outcome.wall_s = 0.0
        try:
            outcome.count_readers(self.run_id, bus, sender)
            found = committed(run.folder / "checkpoints")
            if not found:
                self._find("no checkpoint was committed", TRAINER, run.log_tail(TRAINER))
                return
            try:
                inputs = gather(self.run_id, bus, blobs, run.folder / "checkpoints", reads_packs=True)
            except PenstockError as err:
                self._find(f"the audit cannot read the run: {type(err).__name__}: {err}", TRAINER, "")
                self._calm_services(run)
                remove_undecodable(self.run_id, self._admin)
                inputs = gather(self.run_id, bus, blobs, run.folder / "checkpoints", reads_packs=True)
            proof = check_record(inputs)
            outcome.audit = proof.to_document()
            with tempfile.TemporaryDirectory() as scratch:
                evidence = Evidence(
                    self.run_id, corpus, blobs, self.folder, GROUP_SIZE, announcements(self.run_id, bus), sender.forged,
                    captures_all=NatsServer.name not in outcome.kills,
                )  # fmt: skip
                judge = Judge(evidence, Path(scratch))
                outcome.trained = judge.judge(list(chapters(found[-1][1].record, blobs.get))[::-1])
        except Exception as err:  # noqa: BLE001  a proof that cannot be made is a finding
            self._find(f"the proof failed: {type(err).__name__}: {err}", TRAINER, traceback.format_exc())

    def _calm_services(self, run: RunOfRoles) -> None:
        """Stop all services: nothing is dead-lettered any more while the run is cleaned and audited."""
        now = time.time() + _STOP_S
        self._killed.update((view.name, now) for view in run.processes())
        run.stop()

    def _replay(self, servers: Servers) -> dict[str, Any]:
        if not self.outcome.audit:
            return {}
        with Servers(self.folder, self.run_id, lambda _: None) as again:
            environ = {**os.environ, **connection_environment(again.nats.login("admin"), again.s3.settings)}
            try:
                return report_of("replay", self.run_id, self.folder / "runs", environ)
            except DeployError as err:
                return {"holds": False, "difference": str(err)}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.rigs.fuzz.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="how long to attack, over all rounds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=800.0, help="most attacks a second")
    parser.add_argument("--depth", type=int, default=250, help="most messages that wait in a queue")
    parser.add_argument("--kill-every", type=float, default=20.0, help="mean seconds between two SIGKILLs; 0: none")
    parser.add_argument("--lora", action="store_true", help="the run trains and publishes adapters")
    parser.add_argument("--without", nargs="*", default=[], metavar="CLASS", help="leave these classes out")
    parser.add_argument(
        "--with", nargs="*", default=[], metavar="CLASS", dest="and_also", help="also what is not defended"
    )
    parser.add_argument("--only", nargs="*", default=[], metavar="CLASS", help="these classes alone")
    parser.add_argument("--send", type=Path, help="send the attacks recorded in this file, instead of drawing them")
    parser.add_argument(
        "--findings", type=Path, default=Path("fuzz-findings"), help="folder for attacks and logs of findings"
    )
    parser.add_argument("--json", type=Path, help="also write every figure to this file")
    parser.add_argument("--keep", type=Path, help="keep the runs' folders here")
    parser.add_argument("--no-replay", action="store_true", help="leave out the replay of the record")
    parser.add_argument("--classes", action="store_true", help="list the classes of attacks and exit")
    options = parser.parse_args()
    if options.classes:
        print("\n".join(f"{name:<14} {text}" for name, (_, _, text) in CLASSES.items()))
        return 0
    kinds = set(options.only) or ((CLASSES.keys() - NOT_DEFENDED) | set(options.and_also)) - set(options.without)
    if unknown := (kinds | set(options.without)) - CLASSES.keys():
        parser.error(f"no class {', '.join(sorted(unknown))}; --classes lists them")
    recorded = [from_line(line) for line in options.send.read_text().splitlines()] if options.send else []
    if recorded:
        options.seed = next(
            int(a.subject.split("fuzz-")[1].split(".")[0].split("-")[0]) for a in recorded if "fuzz-" in a.subject
        )
    logs.configure("fuzz", level="error")
    end, seed, outcomes = time.monotonic() + options.seconds, options.seed, []
    while not outcomes or (time.monotonic() < end - _LEAST_ROUND_S and not recorded):
        with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
            folder = (options.keep or Path(scratch)).absolute() / f"seed-{seed}"
            folder.mkdir(parents=True)
            left = options.seconds if not outcomes else end - time.monotonic()
            try:
                outcome = FuzzRun(folder, seed=seed, kinds=kinds, options=options).go(
                    min(left, options.seconds), recorded
                )
            except DeployError as err:
                print(f"seed {seed}: {err}", file=sys.stderr)
                return 1
        print(show(outcome), flush=True)
        outcomes.append(outcome)
        seed += 1
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=1, default=str))
    num_found = sum(bool(outcome.failures()) for outcome in outcomes)
    num_sent = sum(outcome.sent for outcome in outcomes)
    print(f"\n{num_sent} attacks in {len(outcomes)} runs, {num_found} with findings")
    return int(num_found > 0)


if __name__ == "__main__":
    sys.exit(main())
