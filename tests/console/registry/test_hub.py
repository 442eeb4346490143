"""Models and the Hugging Face hub: what was pushed is pulled again; a hub that cannot be reached, or refuses, is an error with the reason."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from tests.console.registry.fake_hub import REPO, WRITER, FakeHub, commit_id, serve

from penstock.console.registry import exchange
from penstock.console.registry.exchange import push_model
from penstock.protocol.errors import ConfigError

FILES = {"config.json": b"{}", "model.safetensors": b"weights"}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub on this machine, without the storage that only huggingface.co has; nobody is logged in."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    with serve(FakeHub(FILES)) as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", found.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


def test_a_model_is_downloaded_whole(fake: FakeHub, tmp_path: Path) -> None:
    """The folder has the repository's files and nothing of the library's own."""
    assert exchange.pull("owner/model", tmp_path / "copy", revision=None) == tmp_path / "copy"
    assert {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()} == FILES
    with pytest.raises(ConfigError, match="copy exists; name another folder"):
        exchange.pull("owner/model", tmp_path / "copy", revision=None)


@pytest.mark.filterwarnings(
    "ignore:Use 'content:DeprecationWarning"
)  # of httpx, for the library's upload of a large file
@pytest.mark.parametrize("revision", [None, "v2/candidate"])
def test_a_model_is_pushed_with_its_card_and_pulled_again(
    fake: FakeHub,
    revision: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The real client creates the repository, private, and uploads every byte to the branch; a second push changes what changed."""
    monkeypatch.setenv("HF_TOKEN", WRITER)
    fake.branches.clear()  # there is no such repository yet
    folder = tmp_path / "runs" / "r" / "model"
    folder.mkdir(parents=True)
    files = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 4096, "tokenizer.json": b"[1]"}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    (folder.parent / "config.json").write_text(json.dumps({"settings": {"model": {"path": "start"}}}))
    arguments, branch = [f"run.dir={tmp_path / 'runs'}"], revision or "main"
    for text in (b"{}", b'{"changed": true}'):
        (folder / "config.json").write_bytes(text)
        assert push_model("r", REPO, arguments, private=True, revision=revision) == 0
        assert f"r: {fake.url}/{REPO}/commit/{commit_id(branch)}" in capsys.readouterr().out
    exchange.pull(REPO, tmp_path / "copy", revision=revision)
    pulled = {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()}
    assert "# r, final model" in pulled.pop(exchange.CARD).decode()
    assert pulled == {**files, "config.json": b'{"changed": true}'}
    assert fake.visibility == "private"
    assert set(fake.commits) == {branch}


def test_a_card_of_the_folder_is_kept(fake: FakeHub, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", WRITER)
    (model / exchange.CARD).write_text("---\nlicense: mit\n---\n# mine\n")
    exchange.push(model, REPO, private=True, revision=None, card="# of the run")
    assert fake.branches["main"][exchange.CARD].endswith(b"# mine\n")
    assert fake.branches["main"]["model.safetensors"] == FILES["model.safetensors"]


def test_a_refusal_of_the_hub_names_the_login(fake: FakeHub, model: Path, tmp_path: Path) -> None:
    """Another person's repository is neither read nor written; no folder is left under the name."""
    with pytest.raises(exchange.HubFailed, match=r"other/model was not pulled: .*hf auth login"):
        exchange.pull("other/model", tmp_path / "copy", revision=None)
    assert not (tmp_path / "copy").exists()
    with pytest.raises(exchange.HubFailed, match=r"owner/model was not pushed: .*hf auth login"):
        exchange.push(model, REPO, private=True, revision=None, card="# card")
    assert fake.branches == {"main": FILES}


@pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")
def test_a_file_that_the_storage_refuses_is_an_error_with_the_reason(
    fake: FakeHub, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", WRITER)
    fake.takes_large = False
    (model / "model.safetensors").write_bytes(b"other weights")
    with pytest.raises(exchange.HubFailed, match=r"was not pushed: HTTPStatusError: .*403.*hf auth login"):
        exchange.push(model, REPO, private=True, revision=None, card=None)
    assert fake.branches == {"main": FILES}


def test_a_hub_that_cannot_be_reached_is_an_error_with_the_reason(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    reason = r"owner/model was not pushed: .*check the network, the proxy and HF_ENDPOINT"
    with pytest.raises(exchange.HubFailed, match=reason):
        exchange.push(model, "owner/model", private=True, revision=None, card="# card")


def test_a_repository_that_is_no_model_is_not_taken_for_one(fake: FakeHub, tmp_path: Path) -> None:
    fake.branches["main"] = {"rows.jsonl": b"{}"}
    with pytest.raises(exchange.HubFailed, match=r"is not a model: it has no config\.json"):
        exchange.pull(REPO, tmp_path / "copy", revision=None)
    assert not (tmp_path / "copy").exists()


def test_the_library_is_named_where_it_is_not_installed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[hub\]'"):
        exchange.push(model, REPO, private=True, revision=None, card=None)


def test_only_a_model_folder_is_pushed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a model folder: it has no config\.json"):
        exchange.push(tmp_path, "owner/model", private=True, revision=None, card=None)
