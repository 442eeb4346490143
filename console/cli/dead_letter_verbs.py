"""The verbs of `penstock dead-letters`; `console/tools/dead_letters.py` does the work."""

from __future__ import annotations

import os
from typing import Annotated

from penstock.console.cli.verb_parts import INSPECT
from penstock.protocol.command_line import Help, Json, RunArguments, RunName, application, typed

app = application("dead-letters", help="Messages that could not be processed: list, show, send again.", group=INSPECT)


@app.command(name="list")
def list_dead_letters(run: RunName, *arguments: RunArguments, json: Json = False) -> int:
    """List the dead letters of a run: stage, reason, groups, attempts, when.

    Example:  penstock dead-letters list quickstart
    Then:     penstock dead-letters show RUN ID
    """
    from penstock.console.record.stored_run import ensure_servers
    from penstock.console.tools.dead_letters import print_list

    ensure_servers(run, arguments, os.environ, typed())
    return print_list(run, arguments, os.environ, as_json=json)


@app.command(name="show")
def show_dead_letter(
    run: RunName, number: Annotated[int, Help("Its id in the list.")], *arguments: RunArguments, json: Json = False
) -> int:
    """Print a dead letter with its prompts, and its completions if it has any.

    Example:  penstock dead-letters show quickstart 3
    Then:     penstock dead-letters resend RUN ID
    """
    from penstock.console.record.stored_run import ensure_servers
    from penstock.console.tools.dead_letters import print_one

    ensure_servers(run, arguments, os.environ, typed())
    return print_one(run, number, arguments, os.environ, as_json=json)


@app.command(name="resend")
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
    from penstock.console.record.stored_run import ensure_servers
    from penstock.console.tools.dead_letters import resend

    numbers = [int(word) for word in arguments if word.isdecimal()]
    rest = [word for word in arguments if not word.isdecimal()]
    ensure_servers(run, rest, os.environ, typed())
    return resend(run, numbers, rest, os.environ, everything=all, once_more=once_more)
