"""What the console does not import before somebody needs it: its start is most of what a page costs a short run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

_START = """
import asyncio, gc, json, sys
from pathlib import Path
from penstock.console.lean_imports import lean_imports

with lean_imports():
    from penstock.console.web import serve

folder = Path(sys.argv[1])
access = serve.Access(folder / "tokens")
app = serve.create_app(serve.WebContext(folder, access))
headers = [(b"host", b"127.0.0.1"), (b"authorization", f"Bearer {access.add('me', serve.Role.READ)}".encode())]
answers = []

async def send(message):
    if message["type"] == "http.response.start":
        answers.append(message["status"])

async def receive():
    await asyncio.sleep(60)  # the body of a GET is not read, and nobody hangs up

for path in ("/", "/static/main.js", "/v1/runs"):
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
             "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers,
             "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 1)}
    asyncio.run(app(scope, receive, send))
loaded = sorted(sys.modules)
import aiohttp
print(json.dumps({"answers": answers, "loaded": loaded, "collects": gc.isenabled(), "later": aiohttp.__name__}))
"""


def test_the_page_is_served_without_the_libraries_of_single_views(tmp_path: Path) -> None:
    """Packs need numpy and pyarrow, S3 minio, the reward service httpx; what was hidden can be imported later."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", _START, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["answers"] == [200, 200, 200]
    not_needed = {"numpy", "pyarrow", "minio", "urllib3", "Crypto", "httpx", "aiohttp", "yaml", "tokenizers", "PIL"}
    assert not_needed.isdisjoint(found["loaded"]), sorted(not_needed & set(found["loaded"]))
    assert {"nats", "fastapi"} <= set(found["loaded"])
    assert (found["collects"], found["later"]) == (True, "aiohttp")
