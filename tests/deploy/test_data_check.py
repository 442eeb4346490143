"""`data-check` and `config`: output, exit codes, and no import of torch."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from tests.trainer.data.test_chat_template import write_folder
from tests.trainer.data.test_rows_in_the_wild import TEMPLATES

from penstock.deploy.data_check import rows as data_rows
from penstock.deploy.data_check.check import check_file
from penstock.deploy.data_check.commands import main
from penstock.deploy.quickstart_task import write_data, write_model
from penstock.protocol.config.reward_settings import RewardSettings
from penstock.trainer.__main__ import main as trainer_main
from penstock.trainer.settings import DataSettings

CHECK = ("data-check", "--no-tests")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "m", seed=0)
    write_data(tmp_path, seed=0, num_sft=4, num_train=5, num_eval=3)
    return tmp_path


def test_a_good_file_is_described(folder: Path, capsys: pytest.CaptureFixture[str]):
    """Format, usable algorithms, data sources and token lengths are printed; the exit code is 0."""
    assert main([*CHECK, str(folder / "train.jsonl"), "--model", str(folder / "m")]) == 0
    printed = capsys.readouterr().out
    assert f"{folder / 'train.jsonl'}: 5 rows, format flat" in printed
    assert "grpo with 5 rows, sft with 0 rows" in printed
    assert "sort_digits: 5 rows, 5 with a ground truth" in printed
    assert "min 21  mean 21.0  median 21  p95 21  max 21" in printed
    assert "bad rows               none" in printed


def test_the_report_is_also_json(folder: Path, capsys: pytest.CaptureFixture[str]):
    files = [str(folder / "sft.jsonl"), str(folder / "train.jsonl")]
    assert main([*CHECK, *files, "--json"]) == 0
    sft, train = map(json.loads, capsys.readouterr().out.splitlines())
    assert sft["formats"] == {"messages": 4}
    assert sft["can_train"] == {"grpo": 4, "sft": 4}
    assert sft["completion_length"] == {"min": 8, "mean": 8.0, "median": 8, "p95": 8, "max": 8}
    assert sft["length_unit"] == "characters"
    assert train["data_sources"] == {"sort_digits": {"rows": 5, "with_ground_truth": 5}}


def test_bad_rows_are_listed_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Bad rows are shown with file, line and column, and the exit code is 1; valid rows are still counted."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "a"}\n' * 2 + '{"prompt": 3}\n' * 12)
    assert main([*CHECK, str(path)]) == 1
    printed = capsys.readouterr().out
    assert "grpo with 2 rows" in printed
    assert "1 rows repeat an earlier prompt" in printed
    assert "(none): 2 rows, 0 with a ground truth; set reward.name, which scores them" in printed
    assert f"    {path}:3: column prompt: expected a text or a list of messages, got 3" in printed
    assert "got 3" in printed
    assert printed.count("expected a text") == 1
    assert "(and 11 more rows)" in printed
    assert main([*CHECK, str(tmp_path / "nowhere")]) == 1
    assert "nowhere: not readable" in capsys.readouterr().out


def test_nothing_of_a_row_stays_in_memory_but_its_lengths_and_hashes(tmp_path: Path):
    path = tmp_path / "x.jsonl"
    rows = [{"prompt": f"{n}", "data_source": "gsm8k", "ground_truth": f"{n}" * 40_000} for n in range(100, 300)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    del rows
    tracemalloc.start()
    report = check_file(path, DataSettings(), None, reward=RewardSettings())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.rows_to_test is not None
    with report.rows_to_test as rows:
        rows.seek(0)
        assert sum(1 for _ in rows) == report.num_to_test == 200
    assert peak < 4 * 2**20 < path.stat().st_size / 5


def test_characters_that_the_tokenizer_does_not_know_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Those of control tokens are known, and white space does not count."""
    path = tmp_path / "x.jsonl"
    write_model(tmp_path / "model", seed=0)
    path.write_text('{"prompt": "sort 1 2"}\n{"prompt": "sort 漢 2"}\n')
    assert main([*CHECK, str(path), "--model", str(tmp_path / "model")]) == 0
    assert (
        "has no token for these characters, which vanish from prompts: 漢 (the first in 1 rows)"
        in capsys.readouterr().out
    )
    path.write_text('{"prompt": "sort", "completion": "\\ud800"}\n')
    for setting in ("chat", "plain"):
        assert main([*CHECK, str(path), f"data.text_prompts={setting}", "--model", str(tmp_path / "model")]) == 1
        assert "x.jsonl:1: the text has a lone surrogate" in capsys.readouterr().out


def test_a_run_file_is_not_taken_as_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([*CHECK, "x.jsonl", "run.toml"]) == 2
    assert (
        "run.toml is a run file, no data; type: penstock data check x.jsonl --run run.toml" in capsys.readouterr().err
    )


def test_what_weights_make_of_the_rows_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The share, rows and passes of each weight; weights of other sources are a failure, as at the start of a run."""
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"prompt": str(n), "data_source": "ab"[n % 4 == 0]}) + "\n" for n in range(8)))
    assert main([*CHECK, str(path), "data.weights={a = 1, b = 3}"]) == 0
    assert "b: 75.0% of the prompts, 2 rows, 3 passes over them in 8 prompts" in capsys.readouterr().out
    assert main([*CHECK, str(path), "data.weights={a = 1, c = 3}", "--json"]) == 1
    assert "no row has the data_source c" in json.loads(capsys.readouterr().out.splitlines()[-1])["problem"]


def test_columns_can_be_mapped_and_formats_forced(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """--map and --format work as data.map and data.format do; invalid values are refused."""
    path = tmp_path / "x.csv"
    path.write_text("instruction,output,gold\na,b,c\n")
    arguments = ["data-check", str(path), "--map", "prompt=instruction", "--map", "response=output"]
    assert main([*arguments, "--format", "trl", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["can_train"] == {"grpo": 1, "sft": 1}
    assert main([*arguments, "--format", "trl"]) == 0
    assert (
        "sft reads              prompt from instruction (data.map.prompt); answer from output (data.map.response)"
        in (capsys.readouterr().out)
    )
    for wrong in (["--map", "promt=x"], ["--map", "prompt"], ["--format", "xml"]):
        assert main([*CHECK, str(path), *wrong]) == 2


def test_a_likely_map_is_suggested(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """For columns that no form has, and for a ground truth that no column is read as; what it suggests works."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"Problem": "a", "solution": "b", "level": 1}\n' * 4)
    assert main([*CHECK, str(path), "--first", "3"]) == 1
    wanted = (
        'if they hold them, set data.map.prompt = "Problem" and data.map.ground_truth = "solution" (and 2 more rows)'
    )
    assert wanted in capsys.readouterr().out
    assert main([*CHECK, str(path), "--map", "prompt=Problem"]) == 0
    assert 'if solution holds it, set data.map.ground_truth = "solution"' in capsys.readouterr().out
    both = ["--map", "prompt=Problem", "--map", "ground_truth=solution"]
    assert main([*CHECK, str(path), *both, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["rows"], report["suggested_map"]) == (4, {})
    assert report["data_sources"][""]["with_ground_truth"] == 4


def test_rows_for_sft_only_are_not_bad(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A row without a prompt to answer is usable for SFT; the report gives the reason why GRPO cannot use it."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "a", "response": "b", "data_source": 3}\n')
    assert main([*CHECK, str(path)]) == 0
    printed = capsys.readouterr().out
    assert f"grpo with 0 rows (not all: {path}:1: column data_source: expected a text, got 3)" in printed
    assert "sft with 1 rows" in printed


def test_rows_of_sft_need_no_truth_for_the_reward_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_folder(tmp_path / "m", TEMPLATES["qwen2.5"])
    rows, run = tmp_path / "x.jsonl", tmp_path / "run.toml"
    marked = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 1}]
    rows.write_text(json.dumps({"messages": marked}) + "\n")
    run.write_text(f'[model]\npath = "{tmp_path}/m"\n[sft]\ndata = "{rows}"\n[reward]\nname = "math"\n')
    assert main(["data-check", "--run", str(run)]) == 0
    assert "only the chat template may read" not in capsys.readouterr().out
    assert main(["data-check", "--run", str(run), f'data.train=["{rows}"]']) == 1
    assert "the row's ground_truth must be" in capsys.readouterr().out


def test_a_refusal_exits_with_code_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert trainer_main(["config", "model.pth=x"]) == 2
    assert "unknown key model.pth; did you mean model.path?" in capsys.readouterr().err
    assert main([*CHECK, "x", "--model", str(tmp_path / "no")]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert trainer_main([]) == 2
    assert trainer_main(["dance"]) == 2
    usage = capsys.readouterr().err
    assert usage.count("usage: python -m penstock.trainer COMMAND") == 2
    assert "data-check" in usage


def test_the_trainer_starts_the_command(folder: Path):
    """As it was typed before; with its exit code."""
    typed = [sys.executable, "-P", "-m", "penstock.trainer", "data-check", str(folder / "sft.jsonl"), "--json"]
    done = subprocess.run(typed, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, json.loads(done.stdout)["can_train"]) == (0, {"grpo": 4, "sft": 4})
    wrong = subprocess.run([*typed, "--format", "xml"], capture_output=True, text=True, timeout=120, check=False)
    assert wrong.returncode == 2


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("trainer.__main__", ["config", "model.path=x"]),
        ("deploy.data_check.commands", ["data-check", "--help"]),
        ("deploy.data_check.check", []),
    ],
)
def test_config_and_data_check_start_without_torch(module: str, command: list[str]):
    """Both commands run in a process that never imports torch or transformers."""
    code = (
        f"import sys, penstock.{module} as module\n"
        f"try: {command!r} and module.main({command!r})\nexcept SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'deepspeed'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, stdout=subprocess.DEVNULL)


def test_the_tests_of_rows_are_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """A row whose tests prove nothing, or refuse its own solution, or whose truth no grader can read, is a bad row; not with --no-tests."""
    path = tmp_path / "x.jsonl"
    tests = ("assert add(1, 2) == 3", "add(1, 2) == 3", "assert add(1, 2) == 4")
    rows = [
        {"prompt": "add", "data_source": "mbpp", "test_list": [test], "code": "def add(a, b): return a + b"}
        for test in tests
    ]
    truths = {"math": "\\frac{1}{", "gsm8k": "abc", "qa": "", "multiple_choice": 3, "aime": "5"}
    rows += [{"prompt": name, "data_source": name, "ground_truth": truth} for name, truth in truths.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["data-check", str(path)]) == 1
    printed = capsys.readouterr().out
    assert "tests                  of 3 rows were run, 2 are bad" in printed
    assert all(
        f"{path}:{n}: {name}: the row's ground_truth" in printed
        for n, name in [(4, "math"), (5, "gsm8k"), (6, "qa_em"), (7, "multiple_choice")]
    )
    assert "bad rows               6" in printed
    assert f"{path}:2: code: the row's tests assert nothing" in printed
    assert f"{path}:3: code: the row's own solution passes 0 of 1 tests" in printed
    assert main(["data-check", str(path), "--no-tests"]) == 0
    machine = "import asyncio, sys\nfrom penstock.reward_service import check_tests as c\nasync def f(*a): raise c.GraderFailed('busy')\n"
    machine += "c.GraderPool.equal = f\nsys.exit(asyncio.run(c.check(sys.stdin, sys.stdout)))"
    monkeypatch.setattr(data_rows, "_COMMAND", [sys.executable, "-P", "-c", machine])
    path.write_text(json.dumps({"prompt": "p", "data_source": "math", "ground_truth": "x^2+1"}) + "\n")
    assert main(["data-check", str(path)]) == 0
    assert f"1 could not be tried on this machine, {path}:1: busy" in capsys.readouterr().out
    monkeypatch.setattr(data_rows, "_COMMAND", ["/nonexistent"])  # of an unknown source nothing is tried
    path.write_text(json.dumps({"prompt": "p", "data_source": "unknown", "ground_truth": "5"}) + "\n")
    assert main(["data-check", str(path)]) == 0
