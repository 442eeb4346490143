"""The verbs that start servers and prepare them: rollout, up, certs, bootstrap, and those of `penstock console`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

from penstock.console import launch
from penstock.console.cli.options import INSPECT, SERVE
from penstock.protocol.command_line import Help, RunArguments, application

app = application()  # its verbs are top-level verbs of `penstock`
console_app = application("console", help="Serve the page and the API of all runs.", group=INSPECT)
Tokens = Annotated[Path | None, Help("File of the tokens; default console-tokens in the folder of runs.")]


@app.command(group=SERVE)
def rollout(*arguments: RunArguments) -> None:
    """Start a rollout worker, which generates groups and loads new weights as they are published.

    Start any number on any machines. A worker needs NATS, S3 and the run's name; it can be killed at any time. Servers
    that it starts use every GPU that it sees, or what [placement] gives to engines.

    Example:  penstock rollout run.toml worker.device=cuda
    Then:     penstock watch RUN
    """
    from penstock.console.connections import require_servers

    require_servers(arguments, os.environ)
    from penstock.deploy.placement.run_placement import place_run

    placed = place_run(arguments, os.environ, role="engines", workers=1)
    for line in placed.placement.lines():
        print(line, file=sys.stderr)
    os.environ.update(placed.of_worker(0))
    with placed.claimed():
        launch.replace_process(launch.module("penstock.rollout_service", *arguments, *placed.overrides))


@app.command(group=SERVE)
def up(
    *,
    data: Annotated[Path, Help("Folder of all stored data.")] = Path("data"),
    run: Annotated[str | None, Help("Also create the streams of this run.")] = None,
    nats_port: Annotated[int, Help("Port of NATS; 0: the last one used, else a free one.")] = 0,
    s3_port: Annotated[int, Help("Port of S3; 0: the last one used, else a free one.")] = 0,
    max_store_gb: Annotated[int, Help("Disk space in gigabytes that all streams together may reserve.")] = 50,
    tls: Annotated[bool, Help("Take encrypted connections only, with own certificates.")] = False,
    no_sync: Annotated[
        bool, Help("Acknowledge objects before they are on disk: faster, and a power loss may cost the last of them.")
    ] = False,
) -> int:
    """Start NATS and an S3 server on this machine and print their settings.

    Example:  penstock up --data runs/store
              penstock up --tls        encrypted connections only
    Then:     paste the printed lines into another terminal, then: penstock train run.toml
    """
    from penstock.deploy.local import LocalStack, serve

    stack = LocalStack(
        data, nats_port=nats_port, s3_port=s3_port, max_store_gb=max_store_gb, tls=tls, is_durable=not no_sync
    )
    return serve(stack, run)


@app.command(group=SERVE)
def certs(
    folder: Annotated[Path, Help("Folder of the authority and the certificates.")],
    /,
    *,
    service: Annotated[tuple[str, ...], Help("Service to certify; repeatable.")] = ("nats", "s3"),
    name: Annotated[
        tuple[str, ...], Help("Another host name or IP address of a service, as SERVICE=HOST; repeatable.")
    ] = (),
    days: Annotated[float, Help("Days until the certificates expire.")] = 365.0,
    renew: Annotated[bool, Help("Replace certificates; the authority stays.")] = False,
) -> int:
    """Make a certificate authority in a folder, certificates for TLS of NATS and S3, and a key that signs weights.

    Needs the extra `local`. A certificate that exists is replaced only with --renew; authority and signing key stay.

    Example:  penstock certs tls --name nats=nats.example.com --name s3=10.0.0.5
              penstock certs tls --renew
    Then:     nats.url=tls://nats.example.com:4222 nats.ca_file=tls/ca.pem, s3.endpoint=https://...
              s3.ca_file=tls/ca.pem, trainer.signing_key_file=tls/signing.key
              and worker.trusted_keys_file=tls/signing.pem
    """
    from penstock.deploy.certificates import print_certificates

    return print_certificates(folder, service, name, days=days, renew=renew)


@app.command(group=SERVE)
def bootstrap(
    *arguments: RunArguments,
    run: Annotated[str | None, Help("Id of the run; default run.id of the run file.")] = None,
    s3_users: Annotated[
        str,
        Help(
            "Also create a user of the object store for each role, "
            "on MinIO or a fork; its secret key is s3_ROLE in this folder."
        ),
    ] = "",
    delete: Annotated[bool, Help("Delete the run's streams and their contents.")] = False,
    yes: Annotated[bool, Help("Delete without asking.")] = False,
) -> int:
    """Create the streams, consumers and buckets of a run on NATS and S3, or delete them with --delete.

    `penstock train` does it too, if its NATS user may. Safe to repeat.

    Example:  penstock bootstrap run.toml
              penstock bootstrap run.id=my-run --delete
    Then:     penstock train run.toml
    """
    from penstock.deploy.bootstrap import create_or_delete

    return create_or_delete(arguments, run, s3_users=s3_users, delete=delete, yes=yes)


@console_app.default
def console(
    *arguments: RunArguments,
    host: Annotated[
        str, Help("Address to listen on; every other than loopback needs TLS in front of it.")
    ] = "127.0.0.1",
    port: Annotated[int, Help("Port to listen on; 0 for a free one.")] = 8800,
    tokens: Tokens = None,
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
    from penstock.console.lean_imports import lean_imports
    from penstock.protocol.errors import ConfigError

    try:
        with lean_imports():
            from penstock.console.web.serve import serve
    except ModuleNotFoundError as err:
        raise ConfigError(f"{err.name} is not installed; run: pip install 'penstock[console]'") from None

    return serve(arguments, os.environ, host=host, port=port, tokens=tokens, allow_hosts=allow_host, as_json=json)


@console_app.command
def token(
    name: Annotated[str, Help("Name of the token.")],
    *arguments: RunArguments,
    role: Annotated[
        Literal["read", "log", "run", "admin"],
        Help(
            "read; log: also write figures of scripts; run: also create, start, pause, resume and stop runs; "
            "admin: also delete them."
        ),
    ] = "read",
    days: Annotated[float, Help("Days until it expires; 0: never.")] = 0.0,
    tokens: Tokens = None,
) -> int:
    """Create a token for the API and print it; only its SHA-256 is stored.

    Example:  penstock console token me --role run
    Then:     curl -H "Authorization: Bearer TOKEN" http://127.0.0.1:8800/v1/runs
    """
    from penstock.console.web.access import Access, Role, tokens_file

    access = Access(tokens_file(arguments, os.environ, tokens))
    print(access.add(name, Role[role.upper()], lasts_s=days * 86400.0))
    return 0


@console_app.command
def revoke(name: Annotated[str, Help("Name of the token.")], *arguments: RunArguments, tokens: Tokens = None) -> int:
    """Revoke a token; it ends at once, also in a console that is running.

    Example:  penstock console revoke me
    """
    from penstock.console.web.access import Access, tokens_file

    if Access(tokens_file(arguments, os.environ, tokens)).revoke(name):
        return 0
    print(f"no token {name!r}; nothing was revoked", file=sys.stderr)
    return 1
