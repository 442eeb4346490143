"""`penstock runs …`, `penstock weights …` and the verbs that read what a run has left, as they are typed."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from penstock.console.cli.verb_parts import LOOK, REWARD_URL, TRAIN, Flag, Raw, ServiceUrl, TokenFile

runs = App(name="runs", help="List runs and print their reports.", help_format="plaintext", group=LOOK)
weights = App(
    name="weights", help="List the versions of a run, write one to disk.", help_format="plaintext", group=LOOK
)
record = App(help_format="plaintext")  # its verbs stand beside those of `penstock` itself


@runs.default
@runs.command(name="list")
def list_runs(*arguments: Raw, json: Flag = False) -> int:
    """List the runs of this machine, and those of the broker when one is configured.

    Example:  penstock runs
    Then:     penstock runs show RUN

    Parameters
    ----------
    json
        Print one JSON array instead of the table.
    """
    from penstock.console.tools.runs import print_list

    return print_list(arguments, os.environ, as_json=json)


@runs.command(name="show")
def show_run(run: str, *arguments: Raw) -> int:
    """Print a run's report.

    Example:  penstock runs show quickstart
    Then:     penstock chat RUN

    Parameters
    ----------
    run
        Name of the run.
    """
    from penstock.console.tools.runs import print_one

    return print_one(run, arguments, os.environ)


@weights.default
def list_weights(run: str, *arguments: Raw, json: Flag = False) -> int:
    """List the stored versions of a run: parent, kind and base, what changed, bytes, seconds, and who serves which.

    Example:  penstock weights quickstart
    Then:     penstock weights export RUN --version V --to FOLDER

    Parameters
    ----------
    run
        Name of the run.
    json
        Print one JSON array instead of the table.
    """
    from penstock.console.record import stored_run
    from penstock.console.tools.weights import print_versions

    stored_run.beside(run, arguments, os.environ, sys.argv[1:])
    return print_versions(run, arguments, os.environ, as_json=json)


@weights.command(name="export")
def export_weights(run: str, *arguments: Raw, version: int, to: Path, adapter: Flag = False) -> int:
    """Write a version as a Hugging Face model folder, from its anchor and the patches that follow.

    An adapter is merged into the model that it sits upon, or with --adapter written as it is, in PEFT's format.

    Example:  penstock weights export quickstart --version 12 --to models/v12
    Then:     penstock chat RUN --model models/v12

    Parameters
    ----------
    run
        Name of the run.
    version
        Which version.
    to
        Folder that does not exist yet.
    adapter
        Write adapter_config.json and adapter_model.safetensors alone.
    """
    from penstock.console.record import stored_run
    from penstock.console.tools.weights import export

    stored_run.beside(run, arguments, os.environ, sys.argv[1:])
    return export(run, version, to, arguments, os.environ, adapter=adapter)


@runs.command(name="rm")
def remove_run(run: str, *arguments: Raw, yes: Flag = False, folder: Flag = False, force: Flag = False) -> int:
    """Remove a run: its objects, streams and buckets, and, asked separately, its folder on this machine.

    It says what and how much, and asks first. What lives is not removed, nor a rescored input that another run
    trained on, nor a local store that holds other runs. An interrupted removal is repeated as it was typed.

    Example:  penstock runs rm quickstart
              penstock runs rm my-run nats.url=nats://gpu-1:4222 s3.endpoint=http://gpu-1:9000 --yes
    Then:     penstock runs

    Parameters
    ----------
    run
        Name of the run.
    yes
        Do not ask; the folder is kept, unless --folder is given too.
    folder
        Remove the folder without asking.
    force
        Remove it although services of it are alive, or other runs stand on it.
    """
    from penstock.console.tools.removal import remove_run as remove_it

    return remove_it(run, arguments, os.environ, yes=yes, folder=folder, force=force)


@record.command(group=LOOK)
def replay(
    run: str,
    *arguments: Raw,
    first: Annotated[int | None, Parameter(name="--from")] = None,
    last: Annotated[int | None, Parameter(name="--to")] = None,
    model: Path | None = None,
    json: Flag = False,
) -> None:
    """Train a run again from its stored groups, and compare the weights of every version, hash by hash.

    No worker, reward or queue is needed: only the object store, and the model that the run began with. Groups,
    their order and all settings come from the run's record. On the same kind of machine every version comes
    out the same, and the exit code is 0; otherwise it is 1, and the first version that differs is named, with
    all that is not as it was: packs, settings, libraries, machine.

    Example:  penstock replay quickstart
              penstock replay my-run run.toml --from 40 --to 60
    Then:     penstock lineage RUN --version V

    Parameters
    ----------
    run
        Name of the run.
    first
        Begin with the newest stored checkpoint at or before this version, not with the initial model.
    last
        The last version to make.
    model
        Folder of the initial model, when it is no longer where the run had it.
    json
        Print one JSON object.
    """
    from penstock.console.record import stored_run

    given = {"--from": first, "--to": last, "--model": model}
    options = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    stored_run.become(run, arguments, os.environ, stored_run.replay(run, arguments, os.environ, options, as_json=json))


@record.command(group=TRAIN)
def rescore(
    run: str,
    *arguments: Raw,
    reward: str | None = None,
    weights: str = "",
    into: str | None = None,
    url: ServiceUrl = REWARD_URL,
    token_file: TokenFile = None,
    leave_out_failed: Flag = False,
    json: Flag = False,
) -> int:
    """Score a run's groups again, by another reward or other weights of its parts, for a run without engines.

    The groups that the run trained are scored by the reward service; packs, new rewards and their order become the
    input of another run, which trains on them with the corrections for samples of other policies. Only groups that
    a step trained on are covered: those that were dropped or are in flight are counted, and not in it; nor are held-out
    ones. A group that cannot be scored is an error, never a 0.

    Example:  penstock rescore my-run --reward my_reward
              penstock rescore my-run --weights correct=1,format=0.2 --into my-run-format
    Then:     penstock train run.toml run.id=NEW data.from_run=INPUT

    Parameters
    ----------
    run
        Name of the run.
    reward
        Reward to score by; none: the stored rewards, weighed anew.
    weights
        What each named part counts, part=NUMBER, comma-separated; "reward" is the reward itself. In a reward that the
        run file made of parts the other weights and the gates stay.
    into
        Name of the input; made of the run's and the reward's by default.
    leave_out_failed
        Go on without the groups that could not be scored; they are listed in the input.
    json
        Print one JSON object.
    """
    from penstock.console.record import stored_run
    from penstock.console.record.rescore import How, rescore
    from penstock.console.record.rescoring import Rule, parse_weights

    stored_run.reach(run, arguments, os.environ, sys.argv[1:])
    how = How(Rule(reward, parse_weights(weights)), into, url, token_file, leave_out_failed)
    return rescore(run, arguments, os.environ, how, as_json=json)


@record.command(group=LOOK)
def lineage(
    run: str,
    *arguments: Raw,
    version: int | None = None,
    group: str | None = None,
    full: Flag = False,
    json: Flag = False,
) -> int:
    """Say what a version was made of: groups, prompts, rewards, who scored them, and every version before it.

    With --group: what became of one group, from its issue to the versions it is in.

    Example:  penstock lineage quickstart --version 12
              penstock lineage quickstart --group e0.p17.a0 --full
    Then:     penstock replay RUN --to V

    Parameters
    ----------
    run
        Name of the run.
    version
        The version; the last one by default.
    group
        Id of a group.
    full
        Also every completion with its reward, and the whole chain.
    json
        Print one JSON object.
    """
    from penstock.console.record import stored_run
    from penstock.console.record.lineage import print_lineage

    stored_run.reach(run, arguments, os.environ, sys.argv[1:])
    return print_lineage(run, arguments, os.environ, version=version, group=group, full=full, as_json=json)


@record.command(group=LOOK)
def audit(run: str, *arguments: Raw, fast: Flag = False, json: Flag = False) -> int:
    """Prove that every group of a run counts once, or name those that do not.

    Reads the streams, the checkpoint and the object store, of a run that goes on or is over; takes nothing from it.
    The exit code is 0 when issued = trained + dropped + dead letters + in flight, group by group, else 1.

    Example:  penstock audit my-run
              penstock audit my-run nats.url=nats://gpu-1:4222 run.dir=/shared/runs
    Then:     penstock runs show RUN

    Parameters
    ----------
    run
        Name of the run.
    fast
        Do not fetch the packs of trained groups to verify their hash; see only whether they are there.
    json
        Print one JSON object instead of the table.
    """
    from penstock.console.record import stored_run
    from penstock.console.record.audit import audit_run

    stored_run.beside(run, arguments, os.environ, sys.argv[1:])
    return audit_run(run, arguments, os.environ, fast=fast, as_json=json)
