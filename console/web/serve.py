"""`penstock console`: serve the API and the page, and print the link that opens the page in a browser.

uvicorn never finishes a graceful stop while an event stream is open, so the streams are
ended first (`WebContext.closing`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import uvicorn

from penstock.console import connections
from penstock.console.web.access import Access, Role, tokens_file
from penstock.console.web.app import create_app
from penstock.console.web.context import WebContext
from penstock.protocol import logs
from penstock.protocol.transport import tls
from penstock.serving.web_server import Server, config_of

PORT = 8800
_MAX_CONNECTIONS = 256


def serve(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    *,
    host: str = "127.0.0.1",
    port: int = PORT,
    tokens: Path | None = None,
    allow_hosts: tuple[str, ...] = (),
    as_json: bool = False,
) -> int:
    """Serve until SIGINT or SIGTERM; return the exit code. Raises ConfigError when the address cannot be had."""
    logs.configure("console", level="warning")
    runs_dir = connections.find(arguments, environ).settings.run.dir.absolute()
    access = Access(tokens_file(arguments, environ, tokens))
    with contextlib.closing(tls.listen(host, port, key="--port")) as bound:
        address, bound_port = bound.getsockname()[:2]
        shown = f"[{address}]" if ":" in address else address
        if ipaddress.ip_address(address).is_unspecified:
            shown = allow_hosts[0] if allow_hosts else "127.0.0.1"
        url = f"{tls.scheme(host)}://{shown}:{bound_port}"
        link = f"{url}/?token={access.one_time_link(Role.ADMIN)}"
        print(f"console: {link}   (opens the page once, in one browser)", file=sys.stderr)
        print(f"api: {url}/v1/runs   tokens: penstock console token NAME --role read", file=sys.stderr, flush=True)
        if as_json:
            print(json.dumps({"url": url, "link": link, "tokens": str(access.file)}), flush=True)
        context = WebContext(runs_dir, access, tuple(arguments), dict(environ))
        asyncio.run(_serve(context, bound, (shown, *allow_hosts)))
    return 0


def server_for(context: WebContext, hosts: Sequence[str], *, listens_on: str = "127.0.0.1") -> uvicorn.Server:
    """Return a server that leaves signals to its caller; end it with `stop`.

    Raises ConfigError for a certificate that cannot be used, where it ``listens_on`` more than the loopback.
    """
    return Server(
        config_of(create_app(context, hosts=hosts), max_connections=_MAX_CONNECTIONS, **tls.server_options(listens_on))
    )


def stop(context: WebContext, server: uvicorn.Server) -> None:
    """End the event streams and then the server; call it on the server's loop."""
    context.closing.set()
    server.should_exit = True


async def _serve(context: WebContext, bound: socket.socket, hosts: Sequence[str]) -> None:
    server = server_for(context, hosts, listens_on=bound.getsockname()[0])
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, context, server)
    await server.serve(sockets=[bound])
