"""The verbs of `penstock runs`, `weights` and `dead-letters`, and the verbs that read the record of a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from penstock.console.cli.options import INSPECT, TRAIN, AnyServiceUrl, ServedFiles, TokenFile
from penstock.forensics.replay.options import ReplayOptions
from penstock.protocol.command_line import FLAT, Help, Json, RunArguments, RunName, application, typed

runs = application("runs", help="List runs, print their reports, remove them.", group=INSPECT)
weights = application("weights", help="List the weight versions of a run, export one.", group=INSPECT)
dead_letters = application(
    "dead-letters", help="Messages that could not be processed: list, show, send again.", group=INSPECT
)
record = application()  # its verbs are top-level verbs of `penstock`


@runs.default
@runs.command(name="list")
def list_runs(*arguments: RunArguments, json: Json = False) -> int:
    """List the runs of this machine, and those on NATS when its address is configured.

    Example:  penstock runs
    Then:     penstock runs show RUN
    """
    from penstock.console.tools.runs import print_list

    return print_list(arguments, os.environ, as_json=json)


@runs.command(name="show")
def show_run(run: RunName, *arguments: RunArguments) -> int:
    """Print a run's report.

    Example:  penstock runs show quickstart
    Then:     penstock chat RUN
    """
    from penstock.console.connections import NamedRun
    from penstock.console.tools.runs import print_one

    return print_one(NamedRun(run, arguments))


@runs.command(name="stopped")
def show_stopped(
    run: RunName,
    *arguments: RunArguments,
    step: Annotated[int | None, Help("Of that step; default: the newest one.")] = None,
    json: Json = False,
) -> int:
    """Show the batch at which a run stopped by itself: a gradient that is not finite, a collapse, an engine that differs.

    Every group with its rewards and log-probabilities; values that are far out are marked.

    Example:  penstock runs stopped gsm8k
    Then:     penstock lineage gsm8k --group GROUP
    """
    from penstock.console.connections import NamedRun
    from penstock.console.record.stopped import print_stopped

    return print_stopped(NamedRun(run, arguments), step=step, as_json=json)


@weights.default
def list_weights(run: RunName, *arguments: RunArguments, json: Json = False) -> int:
    """List the stored versions of a run: parent, kind, base, changed share, bytes, seconds, why it is kept, who serves it.

    Example:  penstock weights quickstart
    Then:     penstock weights export RUN --version V --to FOLDER
    """
    from penstock.console.record.stored_run import with_local_servers
    from penstock.console.tools.weights import print_versions

    return print_versions(with_local_servers(run, arguments), as_json=json)


@weights.command(name="export")
def export_weights(
    run: RunName,
    *arguments: RunArguments,
    version: Annotated[int | None, Help("Version to write.")] = None,
    best: Annotated[bool, Help("Write the version with the best evaluation.")] = False,
    to: Annotated[Path, Help("Folder to create; it must not exist.")],
    adapter: Annotated[bool, Help("Write only adapter_config.json and adapter_model.safetensors.")] = False,
    trusted_keys: Annotated[
        Path | None,
        Help("File of keys that must have signed it (`penstock certs`); default PENSTOCK_WORKER__TRUSTED_KEYS_FILE."),
    ] = None,
) -> int:
    """Write a version as a Hugging Face model folder, from its full snapshot and the patches that follow.

    A run keeps its newest versions, the one with the best evaluation, and milestones (trainer.keep_versions, keep_best,
    keep_milestones); `penstock weights RUN` lists them.
    An adapter is merged into its base model, or with --adapter written unmerged in PEFT's format.

    Example:  penstock weights export quickstart --best --to models/best
              penstock weights export quickstart --version 12 --to models/v12
    Then:     penstock chat RUN --model models/best
    """
    from penstock.console.record.stored_run import with_local_servers
    from penstock.console.tools.weights import export
    from penstock.protocol.errors import ConfigError

    if (version is None) != best:
        raise ConfigError("name one version: --best for the one with the best evaluation, or --version V")
    named = with_local_servers(run, arguments)
    return export(named, version, to, adapter=adapter, trusted_keys_file=trusted_keys)


@runs.command(name="trust")
def trust_run(
    run: RunName, *arguments: RunArguments, yes: Annotated[bool, Help("Do not ask for confirmation.")] = False
) -> int:
    """Use the settings in the folder of a run that somebody else made, that was moved, or that an earlier release started.

    Prints the commands, servers, files and code that they name, and asks for confirmation. Until then they are data: the
    console does not start the run or connect to its servers, and no command uses the rewards or trackers that it names.

    Example:  penstock runs trust from-a-colleague
    Then:     penstock watch RUN
    """
    from penstock.console.connections import NamedRun
    from penstock.console.tools.trust import trust
    from penstock.protocol.config.run_file import config_document, load
    from penstock.trainer.settings import TrainerSettings

    defaults = config_document(load(TrainerSettings, overrides=["model.path=.", "data.train=."]))
    return trust(NamedRun(run, arguments), yes=yes, defaults=defaults["settings"])


@runs.command(name="rm")
def remove_run(
    run: RunName,
    *arguments: RunArguments,
    yes: Annotated[bool, Help("Do not ask for confirmation; keep the folder unless --folder is given too.")] = False,
    folder: Annotated[bool, Help("Remove the folder without confirmation.")] = False,
    force: Annotated[bool, Help("Remove it even if its services are running or other runs depend on it.")] = False,
) -> int:
    """Remove a run: its objects, streams and buckets, and, after a second question, its folder on this machine.

    Prints what will be removed and how large it is, and asks for confirmation. Refuses when services of the run are
    running, another run trained on its rescored input, or its local store holds other runs. Repeated, it continues.

    Example:  penstock runs rm quickstart
              penstock runs rm my-run nats.url=nats://gpu-1:4222 s3.endpoint=http://gpu-1:9000 --yes
    Then:     penstock runs
    """
    from penstock.console.connections import NamedRun
    from penstock.console.tools.removal import remove_run as remove_it

    return remove_it(NamedRun(run, arguments), yes=yes, folder=folder, force=force)


@runs.command(name="clean")
def clean_runs(
    *arguments: RunArguments,
    older_days: Annotated[float | None, Help("Choose runs that last changed more days ago.")] = None,
    keep_gb: Annotated[float | None, Help("Choose the oldest runs until the folder has no more gigabytes.")] = None,
    yes: Annotated[bool, Help("Do not ask.")] = False,
) -> int:
    """Remove old runs of the folder of runs, by age and size, with their objects and streams.

    Lists what it will remove, what that frees and why others stay, and asks. Never one that runs or is queued or paused, is evaluated,
    has the tag pinned or a version with a tag, is named in the settings of such a run, or is of a sweep that goes on.

    Example:  penstock runs clean --older-days 30
              penstock runs clean --keep-gb 50 --yes
    """
    from penstock.console.tools.removal import clean

    return clean(arguments, older_days=older_days, keep_gb=keep_gb, yes=yes)


@runs.command(name="backup")
def backup_run(
    run: RunName,
    *arguments: RunArguments,
    to: Annotated[Path, Help("Folder of the backup: new, or that of an earlier backup of this run.")],
) -> int:
    """Copy a run's streams, buckets and objects into a folder, from which it can be restored on any servers.

    Stop the run's services first: it refuses while one is running. A second backup into the same folder copies only the
    objects that are new. The trainer's run folder is not part of it.

    Example:  penstock runs backup quickstart --to backups/quickstart
    Then:     penstock runs restore backups/quickstart nats.url=nats://other:4222 s3.endpoint=http://other:9000
    """
    from penstock.console.record.stored_run import with_local_servers
    from penstock.forensics import backup

    with_local_servers(run, arguments)
    return backup.backup_run(run, arguments, to)


@runs.command(name="restore")
def restore_run(folder: Annotated[Path, Help("Folder of the backup.")], *arguments: RunArguments) -> int:
    """Make a run again from a backup, on servers that do not have it.

    Verifies every file of the backup before it writes anything, and every stream afterwards. After an interruption,
    repeat the command. Needs a login that may create streams.

    Example:  penstock runs restore backups/quickstart nats.url=nats://other:4222 s3.endpoint=http://other:9000
    Then:     penstock audit RUN
    """
    from penstock.forensics import backup

    return backup.restore_run(folder, arguments)


@record.command(group=INSPECT)
def replay(run: RunName, *arguments: RunArguments, options: Annotated[ReplayOptions, FLAT] = ReplayOptions()) -> None:
    """Train a run again from its stored groups and compare the hash of every version.

    Needs only the object store and the initial model: no workers, rewards or queues. Groups, their order and all
    settings come from the run's record. On the same kind of machine every version is identical and the exit code
    is 0. Otherwise it is 1, and the first version that differs is printed with every difference in packs, settings,
    libraries and machine.

    With --batch it trains once on the batch at which the run stopped by itself, from the weights before it, and prints the
    figures of the step and of each group: exit code 0 if the batch alone fails again as the run did, else 1.

    Example:  penstock replay quickstart
              penstock replay my-run run.toml --from 40 --to 60
              penstock replay my-run --batch 41
    Then:     penstock lineage RUN --version V
    """
    from penstock.console.connections import NamedRun
    from penstock.console.record import stored_run

    named = NamedRun(run, arguments)
    stored_run.replace_process(named, stored_run.replay(named, typed()[1:], batch=options.batch))


@record.command(group=TRAIN)
def rescore(  # noqa: PLR0913 - each is an option of the command
    run: RunName,
    *arguments: RunArguments,
    reward: Annotated[
        str | None,
        Help(
            "Reward to score with; default the one of --serve. Without both the stored part scores are weighted again."
        ),
    ] = None,
    weights: Annotated[
        str,
        Help(
            'Weight of each named part, as part=NUMBER, comma-separated; "reward" is the reward itself. For a reward defined by parts in the run file, other weights and gates are kept.'
        ),
    ] = "",
    into: Annotated[str | None, Help("Name of the input; by default made from the names of run and reward.")] = None,
    serve: ServedFiles = (),
    url: AnyServiceUrl = None,
    token_file: TokenFile = None,
    leave_out_failed: Annotated[
        bool, Help("Continue without the groups that could not be scored; the input lists them.")
    ] = False,
    json: Json = False,
) -> int:
    """Score a run's groups again, with another reward or other part weights, as input of a run without engines.

    The reward service scores the groups that the run trained on. Packs, new rewards and order become the input of
    another run, which trains on them with the off-policy corrections. Dropped groups and groups in flight are not
    included, only counted; held-out groups are not included. A group that cannot be scored is an error, never a 0.

    Example:  penstock rescore my-run --serve my_reward.py
              penstock rescore my-run --reward gsm8k
              penstock rescore my-run --weights correct=1,format=0.2 --into my-run-format
    Then:     penstock train run.toml --local run.id=NEW data.from_run=INPUT
    """
    from penstock.console.record.stored_run import with_servers
    from penstock.forensics.rescore import RescoreOptions, Rule, parse_weights, rescore, service_for

    rule = Rule(reward or (serve[0].stem if serve else None), parse_weights(weights))
    words = typed() if reward or not serve else [*typed(), "--reward", serve[0].stem]
    named = with_servers(run, arguments)
    at = service_for(named, rule, url=url, serve=serve, typed=words)
    options = RescoreOptions(rule, into, at, token_file, leave_out_failed)
    return rescore(named, options, as_json=json)


@record.command(group=INSPECT)
def lineage(
    run: RunName,
    *arguments: RunArguments,
    version: Annotated[int | None, Help("The version; default the last one.")] = None,
    group: Annotated[str | None, Help("Id of a group.")] = None,
    full: Annotated[
        bool, Help("Also print every completion with its reward, and the whole chain of versions.")
    ] = False,
    json: Json = False,
) -> int:
    """Show what a version was trained on: groups, prompts, rewards, scorers, and all earlier versions.

    With --group: the history of one group, from its issue to the versions trained on it.

    Example:  penstock lineage quickstart --version 12
              penstock lineage quickstart --group e0.p17.a0 --full
    Then:     penstock replay RUN --to V
    """
    from penstock.console.connections import NamedRun
    from penstock.console.record.lineage import print_lineage

    return print_lineage(NamedRun(run, arguments), version=version, group=group, full=full, as_json=json)


@record.command(group=INSPECT)
def profile(run: RunName, *arguments: RunArguments, json: Json = False) -> int:
    """Show where the time of a run went: phases of the trainer's steps, work, waiting and CPU of every service.

    Reads the files in the run's folder, also while it is running; asks no server.

    Example:  penstock profile quickstart
              penstock profile my-run run.dir=/shared/runs --json
    Then:     penstock plan run.toml
    """
    from penstock.console.connections import NamedRun
    from penstock.console.tools.profile import print_profile

    return print_profile(NamedRun(run, arguments), as_json=json)


@record.command(group=INSPECT)
def audit(
    run: RunName,
    *arguments: RunArguments,
    fast: Annotated[
        bool, Help("Do not fetch the packs of trained groups to verify their hash; check only that they exist.")
    ] = False,
    json: Json = False,
) -> int:
    """Check that every group of a run was counted exactly once, and list those that were not.

    Reads streams, checkpoint and object store of a running or finished run, and consumes no message.
    The exit code is 0 when issued = trained + dropped + dead letters + in flight for every group, else 1.

    Example:  penstock audit my-run
              penstock audit my-run nats.url=nats://gpu-1:4222 run.dir=/shared/runs
    Then:     penstock runs show RUN
    """
    from penstock.console.record.stored_run import with_local_servers
    from penstock.forensics.audit.audit import audit_run

    with_local_servers(run, arguments)
    return audit_run(run, arguments, os.environ, fast=fast, as_json=json)


@dead_letters.command(name="list")
def list_dead_letters(run: RunName, *arguments: RunArguments, json: Json = False) -> int:
    """List the dead letters of a run: stage, reason, groups, attempts, when.

    Example:  penstock dead-letters list quickstart
    Then:     penstock dead-letters show RUN ID
    """
    from penstock.console.record.stored_run import with_servers
    from penstock.console.tools.dead_letters import print_list

    return print_list(with_servers(run, arguments), as_json=json)


@dead_letters.command(name="show")
def show_dead_letter(
    run: RunName, number: Annotated[int, Help("Its id in the list.")], *arguments: RunArguments, json: Json = False
) -> int:
    """Print a dead letter with its prompts, and its completions if it has any.

    Example:  penstock dead-letters show quickstart 3
    Then:     penstock dead-letters resend RUN ID
    """
    from penstock.console.record.stored_run import with_servers
    from penstock.console.tools.dead_letters import print_one

    return print_one(with_servers(run, arguments), number, as_json=json)


@dead_letters.command(name="resend")
def resend_dead_letters(
    run: RunName,
    *arguments: RunArguments,
    all: Annotated[bool, Help("Send all of them, instead of those named.")] = False,
    once_more: Annotated[bool, Help("Include those that were sent again before.")] = False,
) -> int:
    """Send dead letters again, to the stage that gave them up; on arrival the trainer counts their groups as outstanding.

    Refused, with the reason, when it would have no effect: the run has ended, or the samples are too old by now.

    Example:  penstock dead-letters resend quickstart 3 4
              penstock dead-letters resend quickstart --all
    Then:     penstock watch RUN
    """
    from penstock.console.record.stored_run import with_servers
    from penstock.console.tools.dead_letters import resend

    numbers = [int(word) for word in arguments if word.isdecimal()]
    rest = [word for word in arguments if not word.isdecimal()]
    return resend(with_servers(run, rest), numbers, everything=all, once_more=once_more)
