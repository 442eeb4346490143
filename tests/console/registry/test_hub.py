"""Models and the Hugging Face hub: a hub that cannot be reached, or refuses, is an error with the reason; nothing is left half done."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from penstock.console.registry import hub
from penstock.protocol.errors import ConfigError

COMMIT = "c" * 40
FILES = {"config.json": b"{}", "model.safetensors": b"weights"}


class FakeHub(BaseHTTPRequestHandler):
    """The part of the hub's API that a download needs."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        name = self.path.rpartition("/")[2]
        if self.path.startswith("/api/models/owner/model/revision/"):
            body = json.dumps(
                {"id": "owner/model", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}
            ).encode()
        elif self.path.startswith("/api/models/owner/model/tree/"):
            entries = [{"type": "file", "path": one, "size": len(data), "oid": one} for one, data in FILES.items()]
            body = json.dumps(entries).encode()
        elif self.path.startswith("/owner/model/resolve/") and name in FILES:
            body = FILES[name]
        else:
            self.send_response(401)
            self.end_headers()
            return
        self.send_response(200)
        for key, value in (("X-Repo-Commit", COMMIT), ("ETag", f'"{name}"'), ("Content-Length", str(len(body)))):
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent."""


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a hub on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    yield url
    server.shutdown()
    server.server_close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


def test_a_model_is_downloaded_whole(endpoint: str, tmp_path: Path) -> None:
    """The folder has the repository's files and nothing of the library's own."""
    assert hub.pull("owner/model", tmp_path / "copy", revision=None) == tmp_path / "copy"
    assert {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()} == FILES
    with pytest.raises(ConfigError, match="copy exists; name another folder"):
        hub.pull("owner/model", tmp_path / "copy", revision=None)


def test_a_refusal_of_the_hub_names_the_login(endpoint: str, model: Path, tmp_path: Path) -> None:
    """Another person's repository is neither read nor written; no folder is left under the name."""
    with pytest.raises(hub.HubFailed, match=r"other/model was not pulled: .*hf auth login"):
        hub.pull("other/model", tmp_path / "copy", revision=None)
    assert not (tmp_path / "copy").exists()


def test_a_hub_that_cannot_be_reached_is_an_error_with_the_reason(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    """With what to check; nothing waits for it."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        hub.HubFailed, match=r"owner/model was not pushed: .*check the network, the proxy and HF_ENDPOINT"
    ):
        hub.push(model, "owner/model", private=True, revision=None, card="# card")


def test_only_a_model_folder_is_pushed(tmp_path: Path) -> None:
    """Not some folder with other files of the user."""
    with pytest.raises(ConfigError, match=r"is not a model folder: it has no config\.json"):
        hub.push(tmp_path, "owner/model", private=True, revision=None, card=None)
