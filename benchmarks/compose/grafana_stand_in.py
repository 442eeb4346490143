"""Stands in for Grafana's image: its variables, its provisioning files, and HTTPS on port 3000 with `/api/health`.

It is healthy while every data source that is provisioned answers a query through it, as Grafana would send it, and every
folder of dashboards has some. It draws nothing.
"""

from __future__ import annotations

import http.server
import json
import os
import re
import ssl
import urllib.request
from pathlib import Path
from typing import Any

import yaml

PROVISIONING = Path("/etc/grafana/provisioning")


def provisioned(kind: str, key: str) -> list[dict[str, Any]]:
    """Return the entries of all files of a kind."""
    files = sorted((PROVISIONING / kind).glob("*.yml"))
    return [one for file in files for one in yaml.safe_load(file.read_text())[key]]


def filled_in(value: str) -> str:
    """Replace ``$__file{PATH}`` by what the file holds, as Grafana does."""
    return re.sub(r"\$__file\{([^}]*)\}", lambda match: Path(match[1]).read_text(), value)


def problems() -> list[str]:
    """Return what Grafana would show no data for."""
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
        """Answer /api/health."""
        body = json.dumps(problems()).encode()
        self.send_response(200 if body == b"[]" else 503)
        self.send_header(
            "Content-Length", str(len(body))
        )  # without it wget takes the end of the connection for an error, and asks again
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    """Serve until SIGTERM."""
    server = http.server.ThreadingHTTPServer(("0.0.0.0", 3000), _Page)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(os.environ["GF_SERVER_CERT_FILE"], os.environ["GF_SERVER_CERT_KEY"])
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
