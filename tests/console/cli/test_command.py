"""The `penstock` command, and the process that each verb starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.console.command import penstock, started

from penstock import __version__
from penstock.console import connections, launch
from penstock.console.cli.main import app, run
from penstock.console.cli.options import LocalOptions
from penstock.deploy import train
from penstock.protocol.errors import ConfigError

ROOT = Path(__file__).parents[3]


def python(code: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=180, check=True)


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_help_lists_every_verb_and_the_first_command(words: list[str], tmp_path: Path):
    answer = started(*words, cwd=tmp_path)
    assert "New here? Type: penstock quickstart" in answer.stdout
    assert [verb for verb in app if not verb.startswith("-") and f"│ {verb} " not in answer.stdout] == []


@pytest.mark.parametrize(
    ("typed", "meant"), [("trian", "train"), ("quikstart", "quickstart"), ("reward serv", "serve")]
)
def test_an_unknown_verb_gets_a_suggestion(typed: str, meant: str, tmp_path: Path):
    answer = penstock(*typed.split(), cwd=tmp_path, code=2)
    assert f'Did you mean "{meant}"?' in " ".join(answer.stderr.split())


def test_help_is_fast():
    """The modules of the command load in under 0.4 CPU seconds."""
    code = "import time; import penstock.console.cli.main; print(time.process_time())"
    assert any(float(python(code).stdout) < 0.4 for _ in range(5)), "a busy machine takes more at times"


@pytest.mark.parametrize("command", ["version", "runs", "settings trainer.lr"])
def test_commands_without_servers_import_no_client(command: str, tmp_path: Path):
    """They answer at once: the clients of NATS and S3 are most of the time that a command takes to start."""
    code = (
        "import sys, atexit; from penstock.console.cli.main import main;"
        "slow = {'nats', 'minio', 'structlog', 'httpx'};"
        "atexit.register(lambda: print(sorted(slow & set(sys.modules)), file=sys.stderr));"
        f"main({command.split()})"
    )
    assert python(code, tmp_path).stderr.strip() == "[]"


def test_the_console_needs_no_torch():
    """Every module of the console imports on a machine without torch, deepspeed and transformers."""
    files = (ROOT / "console").rglob("*.py")
    modules = [".".join(("penstock", *path.relative_to(ROOT).with_suffix("").parts)) for path in files]
    python(
        "import sys; heavy = ('torch', 'deepspeed', 'transformers'); sys.modules.update(dict.fromkeys(heavy));"
        f"import importlib; [importlib.import_module(m) for m in {modules}]"
    )


def test_version_names_what_a_bug_report_needs(tmp_path: Path):
    """Version, interpreter, platform and the libraries that matter; the flag prints the version alone."""
    lines = started("version", cwd=tmp_path).stdout.splitlines()
    assert [line.split()[0] for line in lines][:4] == ["penstock", "python", "platform", "torch"]
    assert started("--version", cwd=tmp_path).stdout.strip() == __version__


def test_a_verb_is_replaced_by_its_service(tmp_path: Path):
    """The service's process exits with its own code, with any files in the working directory."""
    for name in ("rollout_service", "penstock", "protocol"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('imported from the working directory')")
    answer = started("rollout", "run.toml", "--worker.id", "w 1", cwd=tmp_path, code=1)
    assert "run.toml: not readable" in answer.stderr
    assert "working directory" not in answer.stdout + answer.stderr


def test_arguments_arrive_unchanged_and_in_order_in_one_process():
    """Both forms of overrides reach the service unchanged; a training has one rank by default."""
    typed = ["run.toml", "trainer.lr=1e-6", "--trainer.steps", "3", "--data.map.a=b c", "-x"]
    start = [sys.executable, "-P", "-m"]
    assert launch.module("penstock.rollout_service", *typed) == [*start, "penstock.rollout_service", *typed]
    assert launch.trainer_command(["trainer.lr=1"], {}) == [*start, "penstock.trainer", "train", "trainer.lr=1"]


@pytest.mark.parametrize("source", ["file", "override", "flag", "environment"])
def test_train_starts_torchrun_for_several_ranks(source: str, tmp_path: Path):
    """From any source, num_ranks sets the number of ranks, and torchrun does not read the trainer's flags."""
    file = tmp_path / "run.toml"
    file.write_text("[trainer]\nnum_ranks = 2\n" if source == "file" else "[trainer]\nnum_ranks = 1\n")
    arguments = [str(file)]
    arguments += {"override": ["trainer.num_ranks=2"], "flag": ["--trainer.num-ranks", "2"]}.get(source, [])
    environ = {"PENSTOCK_TRAINER__NUM_RANKS": "2"} if source == "environment" else {}
    command = launch.trainer_command(arguments, environ)
    torchrun = ["-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python", "--"]
    rank = [sys.executable, "-P", "-m", "penstock.trainer", "train", *arguments]
    assert command == [sys.executable, *torchrun, *rank]


def test_train_starts_all_services_or_the_trainer_alone(monkeypatch: pytest.MonkeyPatch):
    """--local, its options and --json are not settings of the run file; what was typed resumes the run."""
    called: list[tuple[object, ...]] = []
    monkeypatch.setattr(connections, "require_servers", lambda *_: None)
    for name in ("train_local", "train_attached"):
        monkeypatch.setattr(train, name, lambda *given, **named: called.append((*given, named)) or 0)
    local = ["run.toml", "--local", "a.b=1", "--json", "--serve", "r.py", "--workers", "3"]
    assert run(["train", *local]) == run(["train", "a.b=1", "--json"]) == 0
    assert called == [
        (
            ("run.toml", "a.b=1"),
            LocalOptions(workers=3, serve=(Path("r.py"),)),
            {"as_json": True, "again": tuple(local)},
        ),
        (("a.b=1",), None, {"as_json": True, "again": ("a.b=1", "--json")}),
    ]


def test_options_of_local_need_it(capsys: pytest.CaptureFixture[str]):
    """Without --local they would start nothing."""
    assert run(["train", "run.toml", "--workers", "3"]) == 1
    assert "options of penstock train --local; add --local" in capsys.readouterr().err


def test_a_mistyped_option_gets_a_suggestion(capsys: pytest.CaptureFixture[str]):
    """With exit code 2, also for a value that is none of the choices."""
    assert run(["certs", "tls", "--renw"]) == 2
    assert "Did you mean --renew?" in " ".join(capsys.readouterr().err.split())
    assert run(["train", "run.toml", "--local", "--worker", "3"]) == 2
    assert "there is no option --worker; did you mean --workers?" in capsys.readouterr().err
    assert run(["quickstart", "--engine", "sglan"]) == 2
    assert 'you mean "sglang"?' in " ".join(capsys.readouterr().err.split())
    assert run(["quickstart", "--steps", "1"]) == 2
    assert "Must be >= 2" in capsys.readouterr().err
    assert run(["train", "run.toml", "--nodes", "0"]) == 2
    assert "Must be >= 1" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", ["0", "-1", "two", "1.5", "true"])
def test_an_impossible_number_of_ranks_is_refused(ranks: str):
    """The error names the expected value and the source of the actual one."""
    with pytest.raises(ConfigError, match=r"override: trainer.num_ranks: expected a whole number of at least 1"):
        launch.trainer_command([f"trainer.num_ranks={ranks}"], {})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train nowhere.toml", "penstock: nowhere.toml: not readable (No such file or directory)\n"),
        ("train run.toml", "run.toml:2"),  # TOML that does not parse
        ("watch nobody nats.url=nats://127.0.0.1:1", "no NATS server at nats://127.0.0.1:1"),
        ("watch nobody nats.url=nats://127.0.0.1:1", "penstock up"),
        ("watch nobody nats.ulr=nats://x", "did you mean nats.url?"),
    ],
)
def test_an_error_says_where_and_what_to_do(words: str, said: str, tmp_path: Path):
    (tmp_path / "run.toml").write_text("[trainer]\nlr = \n")
    answer = penstock(*words.split(), cwd=tmp_path, code=1)
    assert said in answer.stderr
    assert answer.stderr.startswith("penstock: ")


@pytest.mark.parametrize("verb", [["train"], ["rollout"], ["reward", "service"]])
def test_without_servers_the_answer_is_immediate(
    verb: list[str], replaced: list[list[str]], monkeypatch: pytest.MonkeyPatch
):
    """No server was configured and none listens at the default address: `penstock up` and --local are named."""
    monkeypatch.setattr(connections, "answers", lambda _: False)  # a NATS of this machine may listen there
    with pytest.raises(ConfigError, match=r"no NATS server at .*penstock up.*penstock train run.toml --local"):
        app([*verb, "run.id=r"], exit_on_error=False)


def test_a_configured_server_may_still_be_starting():
    """Only the default addresses are checked before the service starts, which waits for its servers itself."""
    connections.require_servers(["nats.url=nats://127.0.0.1:1", "s3.endpoint=http://127.0.0.1:1"], {})


@pytest.mark.parametrize("command", ["runs --json", "data check d.jsonl"])
def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path, command: str):
    """`penstock … | head`: no traceback, and the exit code of a process that SIGPIPE ended."""
    (tmp_path / "d.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "runs" / "r" / "model").mkdir(parents=True)
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "penstock", *command.split()],
        stdout=writer, stderr=subprocess.PIPE, text=True, cwd=tmp_path, timeout=180, check=False,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
