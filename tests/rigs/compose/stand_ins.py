"""Stand in for the images of MinIO and Grafana.

    python -m tests.rigs.compose.stand_ins s3 server /data --console-address :9001 --certs-dir /certs
    python -m tests.rigs.compose.stand_ins grafana

``s3``: MinIO's command line, variables, certificate folder, users and policies, before a real S3 server. Every request that a user's policy
does not allow is a line on stdout. ``grafana``: its variables, its provisioning files, and HTTPS on port 3000 with `/api/health`. It is
healthy while every data source that is provisioned answers a query through it, as Grafana would send it, and every folder of
dashboards has some. It draws nothing.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import re
import ssl
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from tests.policed_s3 import PolicedS3

from penstock.deploy.local import stop_on_signals
from penstock.deploy.processes.servers import S3Server

PROVISIONING = Path("/etc/grafana/provisioning")


def provisioned(kind: str, key: str) -> list[dict[str, Any]]:
    files = sorted((PROVISIONING / kind).glob("*.yml"))
    return [one for file in files for one in yaml.safe_load(file.read_text())[key]]


def filled_in(value: str) -> str:
    """Replace ``$__file{PATH}`` by what the file holds, as Grafana does."""
    return re.sub(r"\$__file\{([^}]*)\}", lambda match: Path(match[1]).read_text(), value)


def problems() -> list[str]:
    found = []
    for source in provisioned("datasources", "datasources"):
        authority = filled_in(source["secureJsonData"]["tlsCACert"])
        context = ssl.create_default_context(cadata=authority)
        try:
            with urllib.request.urlopen(f"{source['url']}/api/v1/query?query=up", timeout=3, context=context) as answer:
                if json.load(answer)["status"] != "success":
                    found.append(f"{source['name']}: the query failed")
        except OSError as err:
            found.append(f"{source['name']}: {err}")
    for provider in provisioned("dashboards", "providers"):
        files = list(Path(provider["options"]["path"]).glob("*.json"))
        titles = [json.loads(file.read_text())["title"] for file in files]
        if not titles:
            found.append(f"{provider['name']}: no dashboard")
    if not Path(os.environ["GF_SECURITY_ADMIN_PASSWORD__FILE"]).read_text().strip():
        found.append("no password of the administrator")
    return found


class _Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps(problems()).encode()
        self.send_response(200 if body == b"[]" else 503)
        self.send_header(
            "Content-Length", str(len(body))
        )  # without it wget takes the end of the connection for an error, and asks again
        self.end_headers()
        self.wfile.write(body)


def serve_grafana() -> None:
    server = http.server.ThreadingHTTPServer(("0.0.0.0", 3000), _Page)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(os.environ["GF_SERVER_CERT_FILE"], os.environ["GF_SERVER_CERT_KEY"])
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()


def serve_s3(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("server", choices=["server"])
    parser.add_argument("data", type=Path)
    parser.add_argument("--console-address")
    parser.add_argument("--certs-dir", type=Path, required=True)
    options = parser.parse_args(arguments)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(options.certs_dir / "public.crt", options.certs_dir / "private.key")
    root = (os.environ["MINIO_ROOT_USER"], Path(os.environ["MINIO_ROOT_PASSWORD_FILE"]).read_text().strip())
    stop = stop_on_signals()
    store = S3Server(options.data, log=Path("/tmp/rclone.log"))
    store.start()
    try:
        with PolicedS3(store.settings, root, host="0.0.0.0", port=9000, tls=tls) as server:
            threading.Thread(target=_tell, args=(server,), daemon=True).start()
            stop.wait()
    finally:
        store.stop()


def _tell(server: PolicedS3) -> None:
    told = 0
    while True:
        for user, action, resource in server.refused[told:]:
            told += 1
            print(f"refused {user} {action} {resource}", flush=True)
        time.sleep(0.2)


if __name__ == "__main__":
    if sys.argv[1] == "grafana":
        serve_grafana()
    else:
        serve_s3(sys.argv[2:])
