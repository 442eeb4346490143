"""The verbs of `penstock console`: the Runs API with the live page, and its tokens."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

from penstock.console.cli.verb_parts import INSPECT
from penstock.protocol.command_line import Help, Parameter, RunArguments, application

app = application("console", help="Serve the page and the API of all runs.", group=INSPECT)
Tokens = Annotated[Path | None, Parameter(help="File of the tokens; default console-tokens in the folder of runs.")]


@app.default
def console(
    *arguments: RunArguments,
    host: Annotated[
        str, Help("Address to listen on; every other than loopback needs TLS in front of it.")
    ] = "127.0.0.1",
    port: Annotated[int, Help("Port to listen on; 0 for a free one.")] = 8800,
    tokens: Annotated[Tokens, Help("File of the tokens; default console-tokens in the folder of runs.")] = None,
    allow_host: Annotated[
        tuple[str, ...], Help("Another name that the Host header may have, as behind a proxy. Repeatable.")
    ] = (),
    json: Annotated[bool, Help("Print one JSON object with the URL on stdout.")] = False,
) -> int:
    """Serve the live page and the Runs API of this machine's runs, and print the link that opens the page.

    The link works once; every request of the API needs a token. It may be killed at any time: runs go on, and the next
    console finds them again. Needs the extra `console`.

    Example:  penstock console
              penstock console run.dir=/shared/runs --port 0
    Then:     penstock console token me --role run
    """
    from penstock.console.lean_imports import UNUSED_BY_CONSOLE, lean_imports
    from penstock.protocol.errors import ConfigError

    try:
        with lean_imports(without=UNUSED_BY_CONSOLE):
            from penstock.console.web.serve import ServeOptions, serve
    except ModuleNotFoundError as err:
        raise ConfigError(f"{err.name} is not installed; run: pip install 'penstock[console]'") from None

    return serve(arguments, os.environ, ServeOptions(host, port, tokens, allow_host, json))


@app.command
def token(
    name: Annotated[str, Help("Name of the token.")],
    *arguments: RunArguments,
    role: Annotated[
        Literal["read", "run", "admin"],
        Help("read; run: also create, start, pause, resume and stop runs; admin: also delete them."),
    ] = "read",
    days: Annotated[float, Help("Days until it expires; 0: never.")] = 0.0,
    tokens: Annotated[Tokens, Help("File of the tokens; default console-tokens in the folder of runs.")] = None,
) -> int:
    """Create a token for the API and print it; only its SHA-256 is stored.

    Example:  penstock console token me --role run
    Then:     curl -H "Authorization: Bearer TOKEN" http://127.0.0.1:8800/v1/runs
    """
    from penstock.console.web.access import Access, Role
    from penstock.console.web.access import file_of as tokens_file

    access = Access(tokens_file(arguments, os.environ, tokens))
    print(access.add(name, Role[role.upper()], lasts_s=days * 86400.0))
    return 0


@app.command
def revoke(
    name: Annotated[str, Help("Name of the token.")],
    *arguments: RunArguments,
    tokens: Annotated[Tokens, Help("File of the tokens; default console-tokens in the folder of runs.")] = None,
) -> int:
    """Revoke a token; it ends at once, also in a console that is running.

    Example:  penstock console revoke me
    """
    from penstock.console.web.access import Access
    from penstock.console.web.access import file_of as tokens_file

    if Access(tokens_file(arguments, os.environ, tokens)).revoke(name):
        return 0
    print(f"no token {name!r}; nothing was revoked", file=sys.stderr)
    return 1
