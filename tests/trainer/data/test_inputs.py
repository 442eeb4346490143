"""Models and data named by folder or by id on the Hugging Face hub become local files, or a clear error within two seconds."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from penstock.protocol.config.run_file import load
from penstock.protocol.errors import ConfigError
from penstock.trainer.data import hub
from penstock.trainer.data.inputs import choose_files, data_files, model_folder, resolve_inputs
from penstock.trainer.settings import TrainerSettings

GSM8K = [
    "README.md",
    "main/test-0.parquet",
    "main/train-0.parquet",
    "socratic/test-0.parquet",
    "socratic/train-0.parquet",
]
COMMIT = "c" * 40
MODEL = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "onnx/model.bin": b"not wanted",
}
DATA = {"README.md": b"-", "train.jsonl": b'{"prompt": "a"}\n', "test.jsonl": b'{"prompt": "b"}\n'}


class FakeHub(BaseHTTPRequestHandler):
    """Answers the requests of huggingface_hub for one model and one data set."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        repos = {"/api/models/org/tiny": MODEL, "/api/datasets/org/rows": DATA}
        for prefix, files in repos.items():
            if path in (prefix, f"{prefix}/revision/main", f"{prefix}/revision/{COMMIT}"):
                siblings = [{"rfilename": name} for name in files]
                self.answer(json.dumps({"id": prefix, "sha": COMMIT, "siblings": siblings}).encode())
                return
        repos = {f"/org/tiny/resolve/{COMMIT}/": MODEL, f"/datasets/org/rows/resolve/{COMMIT}/": DATA}
        for prefix, files in repos.items():
            if path.startswith(prefix):
                self.answer(files[path.removeprefix(prefix)])
                return
        self.answer(b"{}", status=404 if "none" not in path else 500)

    do_HEAD = do_GET  # noqa: N815  as http.server calls it

    def answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(hub, "REACH_S", 60.0)
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    use(monkeypatch, f"http://127.0.0.1:{server.server_port}", tmp_path / "cache")
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def use(monkeypatch: pytest.MonkeyPatch, endpoint: str, cache: Path) -> None:
    """Point huggingface_hub at an endpoint, as HF_ENDPOINT and HF_HUB_CACHE do when it is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))


def test_ids_become_local_files(endpoint: str, tmp_path: Path):
    """A run file that names model and data by id gets the folder of the model's files and the files of each split."""
    overrides = [
        "model.path=org/tiny",
        "data.train=org/rows",
        "data.eval=org/rows@main:test.jsonl",
        "sft.data=org/rows",
    ]
    found = resolve_inputs(load(TrainerSettings, overrides=overrides).settings)
    assert {path.name for path in found.model.path.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert [path.read_bytes() for path in found.data.train_files] == [DATA["train.jsonl"]]
    assert [path.read_bytes() for path in found.data.eval_files] == [DATA["test.jsonl"]]
    assert [path.name for path in found.sft.files] == ["train.jsonl"]


def test_what_was_downloaded_is_used_without_the_hub(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A second start where the hub cannot be reached uses the first one's files."""
    first = model_folder(Path("org/tiny"), "model.path")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert model_folder(Path("org/tiny"), "model.path") == first


@pytest.mark.parametrize(
    ("name", "reply"),
    [
        ("org/missing", r"model.path = org/missing: there is no such folder .* no model of this id .* \(404\)"),
        ("org/none", r"model.path = org/none: the hub answers 500; try again"),
    ],
)
def test_what_the_hub_refuses_is_reported(endpoint: str, name: str, reply: str):
    with pytest.raises(ConfigError, match=reply):
        model_folder(Path(name), "model.path")


@pytest.mark.parametrize("hub_is", ["absent", "silent", "trickling"])
def test_an_unreachable_hub_is_reported_within_two_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub_is: str
):
    """Nothing listens, or something never answers, or never ends its answer: the error says what to do, in time."""
    assert hub.REACH_S < 2
    monkeypatch.setattr(hub, "REACH_S", 0.5)
    assert hub.huggingface_hub.HfApi  # imported at its first use
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=trickle, args=(server, stop))
        if hub_is == "trickling":
            thread.start()
        use(monkeypatch, f"http://127.0.0.1:{9 if hub_is == 'absent' else server.getsockname()[1]}", tmp_path)
        reason = "" if hub_is == "absent" else r"(no answer within 0.5 s|timed out).*"  # whichever clock is first
        expected = rf"data.train = org/rows: .* cannot be reached .*{reason} set data.train to a local path"
        started = time.monotonic()
        with pytest.raises(ConfigError, match=expected):
            data_files([Path("org/rows")], "data.train", "train")
        assert time.monotonic() - started < 8.0  # the client's own deadline is 10 s
        stop.set()
        if thread.ident:
            thread.join()


def trickle(server: socket.socket, stop: threading.Event) -> None:
    """Send one header without end, a byte at a time; at most 20 s."""
    connection, _ = server.accept()
    with connection:
        connection.send(b"HTTP/1.1 200 OK\r\nX-Long: ")
        for _ in range(200):
            if stop.wait(0.1):
                return
            connection.send(b"x")


def test_files_are_recorded_as_they_were_given():
    """Settings that name files stay as they are: a resumed run finds the same in its record."""
    overrides = ["model.path=m", "data.train=a.jsonl", "data.eval=b/c.csv", 'sft.data=["d.json"]']
    settings = load(TrainerSettings, overrides=overrides).settings
    assert resolve_inputs(settings).model_dump() == settings.model_dump()
    assert resolve_inputs(settings).data.train == Path("a.jsonl")


def test_paths_are_no_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A missing file or folder below an existing folder, an absolute path and a data file are never looked up on the hub."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for path in ("models/missing", str(tmp_path / "a/b"), "a/b/c", "gpt2"):
        assert model_folder(Path(path), "model.path") == Path(path)
    assert data_files([Path("data/train.jsonl")], "data.train", "train") == [Path("data/train.jsonl")]


@pytest.mark.parametrize(
    ("names", "split", "pattern", "chosen"),
    [
        (GSM8K, "train", "main/train-*", ["main/train-0.parquet"]),
        (GSM8K[:3], "train", None, ["main/train-0.parquet"]),
        (GSM8K[:3], "eval", None, ["main/test-0.parquet"]),
        (["validation.csv", "test.csv"], "eval", None, ["validation.csv"]),
        (["b.jsonl", "a.jsonl", "dataset_info.json", ".cache/x.json"], "train", None, ["a.jsonl", "b.jsonl"]),
        (["train/data-0.arrow", "train/state.json", "test/data-0.arrow", "dataset_dict.json"], "train", None,
         ["train/data-0.arrow"]),
    ],
)  # fmt: skip
def test_the_files_of_a_split_are_chosen(names: list[str], split, pattern: str | None, chosen: list[str]):
    """By pattern, or by the split in the path; without splits all data files, never descriptions."""
    assert choose_files(names, split, pattern, "w") == chosen


@pytest.mark.parametrize(
    ("names", "split", "pattern", "reply"),
    [
        (GSM8K, "train", None, "several data sets, main/train-0.parquet, socratic/train-0.parquet; name one"),
        (GSM8K[:3], "train", "x/*", r"no data file matches x/\*; there are main/test-0.parquet, main/train-0.parquet"),
        (["train.csv"], "eval", None, "no file of the split eval; there are train.csv"),
        (["README.md"], "train", None, "no file of the split train; there are none"),
    ],
)
def test_what_is_not_one_choice_is_refused(names: list[str], split, pattern: str | None, reply: str):
    """Several configurations, a missing split, an empty folder: the error lists the files."""
    with pytest.raises(ConfigError, match=f"w: .*{reply}"):
        choose_files(names, split, pattern, "w")


def test_a_local_folder_is_a_data_set(tmp_path: Path):
    for name in ("train-1.jsonl", "train-0.jsonl", "test.jsonl"):
        (tmp_path / name).write_text("{}\n")
    assert data_files([tmp_path], "data.train", "train") == [tmp_path / "train-0.jsonl", tmp_path / "train-1.jsonl"]
    assert data_files([tmp_path], "data.eval", "eval") == [tmp_path / "test.jsonl"]


def test_a_link_out_of_a_data_folder_is_refused(tmp_path: Path) -> None:
    """Rows are sent to workers and stored in packs; links within the folder, and to the blobs of a hub's cache, are followed."""
    folder, secret = tmp_path / "snapshots" / "data", tmp_path / "secret.jsonl"
    folder.mkdir(parents=True)
    secret.write_text("{}")
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "abc").write_text("{}")
    (folder / "train.jsonl").symlink_to(tmp_path / "blobs" / "abc")
    (folder / "more.jsonl").symlink_to("train.jsonl")
    assert data_files([folder], "data.train", "train")
    for name in ("train-1.jsonl", "sub/train.jsonl"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(secret)
        with pytest.raises(ConfigError, match="outside of the folder"):
            data_files([folder], "data.train", "train")
        (folder / name).unlink()
        for path in folder.glob("*.jsonl"):
            path.unlink()
