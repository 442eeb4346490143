"""A Hugging Face hub on this machine: the part of its API that huggingface_hub uses to download and to upload a model."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

REPO = "owner/model"
WRITER = "hf_writer"  # the token that may write to REPO
_LARGE = ".safetensors"  # files that the hub wants in its large file storage
_SECTION = re.compile(rf"/api/models/{REPO}/(\w+)/([^/]+)")


class FakeHub(ThreadingHTTPServer):
    """One repository, whose branches hold files; it stores a large file only under its own SHA-256."""

    def __init__(self, files: dict[str, bytes], *, exists: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.branches: dict[str, dict[str, bytes]] = {"main": dict(files)} if exists else {}
        self.large: dict[str, bytes] = {}
        self.takes_large = True
        self.visibility = ""  # that the repository was created with
        self.commits: list[str] = []


@contextmanager
def serve(hub: FakeHub) -> Iterator[FakeHub]:
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()


def commit_id(branch: str) -> str:
    return hashlib.sha1(branch.encode()).hexdigest()


class _Answer(BaseHTTPRequestHandler):
    @property
    def hub(self) -> FakeHub:
        assert isinstance(self.server, FakeHub)
        return self.server

    def do_HEAD(self) -> None:
        self._read()

    def do_GET(self) -> None:
        self._read()

    def do_PUT(self) -> None:
        oid, data = self.path.rpartition("/")[2], self._body()
        if not self.hub.takes_large or hashlib.sha256(data).hexdigest() != oid:
            self._answer(b"", 403)
            return
        self.hub.large[oid] = data
        self._answer(b"", 200)

    def do_POST(self) -> None:
        body, path = self._body(), urlsplit(self.path).path
        if self.headers.get("authorization") != f"Bearer {WRITER}":
            self._answer(b"", 401)
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._json({"errors": _errors_of(json.loads(body)["content"]), "warnings": []})
        elif path == f"/{REPO}.git/info/lfs/objects/batch":
            wanted = json.loads(body)["objects"]
            self._json({"transfer": "basic", "objects": [self._place(one) for one in wanted]})
        elif (found := _SECTION.fullmatch(path)) is not None:
            self._write(found[1], unquote(found[2]), body)
        else:
            self._answer(b"", 404)

    def _create(self, wanted: dict[str, Any]) -> None:
        if f"{wanted['organization']}/{wanted['name']}" != REPO:
            self._answer(b"", 403)
            return
        exists = bool(self.hub.branches)
        if not exists:
            self.hub.branches["main"] = {}
            self.hub.visibility = wanted["visibility"]
        self._json({"url": f"{self.hub.url}/{REPO}", "id": REPO}, 409 if exists else 200)

    def _place(self, wanted: dict[str, Any]) -> dict[str, Any]:
        return {**wanted, "actions": {"upload": {"href": f"{self.hub.url}/storage/{wanted['oid']}"}}}

    def _write(self, what: str, branch: str, body: bytes) -> None:
        branches = self.hub.branches
        if what == "branch":
            is_new = branch not in branches
            branches.setdefault(branch, dict(branches["main"]))
            self._json({}, 200 if is_new else 409)
        elif what == "preupload":
            files = json.loads(body)["files"]
            modes = [
                {"path": file["path"], "uploadMode": "lfs" if file["path"].endswith(_LARGE) else "regular"}
                for file in files
            ]
            self._json({"files": [{**mode, "shouldIgnore": False} for mode in modes]})
        else:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    branches[branch][value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    branches[branch][value["path"]] = self.hub.large[value["oid"]]
                elif line["key"] == "header":
                    self.hub.commits.append(branch)
            address = f"{self.hub.url}/{REPO}/commit/{commit_id(branch)}"
            self._json({"commitUrl": address, "commitOid": commit_id(branch)})

    def _read(self) -> None:
        path = urlsplit(self.path).path
        name = path.rpartition("/")[2]
        found = _SECTION.match(path) or re.match(rf"/{REPO}/(resolve)/([^/]+)/", path)
        branch = unquote(found[2]) if found else ""
        by_commit = {commit_id(one): one for one in self.hub.branches}
        files = self.hub.branches.get(by_commit.get(branch, branch))
        if found is None or files is None:
            self._answer(b"", 401)
        elif found[1] == "revision":
            siblings = [{"rfilename": file} for file in files]
            self._json({"id": REPO, "sha": commit_id(by_commit.get(branch, branch)), "siblings": siblings})
        elif found[1] == "tree":
            self._json([{"type": "file", "path": one, "size": len(data), "oid": one} for one, data in files.items()])
        elif name in files:
            commit = commit_id(by_commit.get(branch, branch))
            etag = hashlib.sha256(files[name]).hexdigest()
            self._answer(files[name], 200, {"X-Repo-Commit": commit, "ETag": f'"{etag}"'})
        else:
            self._answer(b"", 404)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("content-length", 0)))

    def _json(self, value: Any, status: int = 200) -> None:
        self._answer(json.dumps(value).encode(), status)

    def _answer(self, body: bytes, status: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent."""


def _errors_of(card: str) -> list[dict[str, str]]:
    """The hub's rule that a card breaks most easily: a license that is there is one that the hub knows."""
    given = re.search(r"^license:(.*)$", card, re.MULTILINE)
    is_known = given is None or given[1].strip() in {"apache-2.0", "mit"}
    return [] if is_known else [{"message": '"license" must be one of [apache-2.0, mit]'}]
