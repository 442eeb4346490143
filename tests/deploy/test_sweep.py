"""Sweeps: which runs there are, in which rounds they train, and which is best; the trainings are processes that only write figures."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest

from penstock.console.cli.options import SweepOptions
from penstock.deploy import sweep
from penstock.protocol.errors import ConfigError

# As `penstock sft` does: it continues after the last step, and pauses when it is asked to. The higher the rate, the lower the loss.
_TRAINING = """
import json, sys, time
from pathlib import Path
given = dict(word.split("=", 1) for word in sys.argv[3:])
folder = Path(given["run.dir"]) / given["run.id"]
place, pause = folder / "sft-training", folder / "pause-requested"
place.mkdir(parents=True, exist_ok=True)
pause.unlink(missing_ok=True)
if given["sft.lr"] == "0.5":
    sys.exit(2)
metrics = place / "metrics.jsonl"
done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
for step in range(done + 1, int(given["sft.steps"]) + 1):
    with metrics.open("a") as file:
        print(json.dumps({"kind": "step", "step": step, "loss": 1 / (step * float(given["sft.lr"]))}), file=file)
    while step in (10, 20):  # where each of them is asked to pause
        if pause.exists():
            sys.exit(0)
        time.sleep(0.01)
(place / "result.json").write_text("{}")
"""


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the arguments of a sweep whose trainings are `_TRAINING`."""
    (tmp_path / "stand_in.py").write_text(textwrap.dedent(_TRAINING))
    (tmp_path / "run.toml").write_text(
        f'[model]\npath = "{tmp_path}"\n[data]\ntrain = "rows.jsonl"\n[sft]\nsteps = 60\n'
    )
    monkeypatch.setattr(
        sweep.launch, "module", lambda _, *words: [sys.executable, str(tmp_path / "stand_in.py"), *words]
    )
    monkeypatch.setattr(sweep, "_POLL_S", 0.01)
    return [str(tmp_path / "run.toml"), "run.id=try", f"run.dir={tmp_path}", "sft.steps=60"]


def _steps(folder: Path) -> dict[str, int]:
    paths = sorted(folder.glob("*/sft-training/metrics.jsonl"))
    return {path.parents[1].name: len(path.read_text().splitlines()) for path in paths}


def test_the_better_half_goes_on_and_the_same_command_continues(
    training: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = SweepOptions(vary=("sft.lr=0.1,0.2,0.3,0.4",), command="sft", halving=10)
    assert sweep.sweep(training, options, as_json=True) == 0
    steps = _steps(tmp_path)
    assert steps == {"try-lr-0p1": 10, "try-lr-0p2": 10, "try-lr-0p3": 20, "try-lr-0p4": 60}
    lines = json.loads(capsys.readouterr().out)
    assert [(line["run"], line["state"]) for line in lines] == [
        ("try-lr-0p4", "finished"), ("try-lr-0p3", "stopped"), ("try-lr-0p2", "stopped"), ("try-lr-0p1", "stopped"),
    ]  # fmt: skip
    assert sweep.sweep(training, options, as_json=True) == 0
    assert _steps(tmp_path) == steps, "what was done is not done again"
    capsys.readouterr()
    wider = SweepOptions(vary=("sft.lr=0.4,0.5",), command="sft")
    assert sweep.sweep(training, wider, as_json=False) == 1, "a run failed"
    best, worst = capsys.readouterr().out.splitlines()
    assert best == "try-lr-0p4  finished  step 60     loss 0.04167"
    assert worst == "try-lr-0p5  stopped   step 0      loss –"


def test_combinations_are_those_of_the_values_or_drawn(training: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    grid = SweepOptions(vary=("sft.lr=1e-6,1e-5", "run.seed=0,1"), command="sft", only_print=True)
    assert sweep.sweep(training, grid, as_json=False) == 0
    assert [line.split()[-2:] for line in capsys.readouterr().out.splitlines()] == [
        [f"sft.lr={rate}", f"run.seed={seed}"] for rate in ("1e-6", "1e-5") for seed in (0, 1)
    ]
    files, overrides = sweep.split_arguments(training)
    drawn = SweepOptions(vary=("sft.lr=1e-7..1e-4", "run.seed=0,1"), command="sft", random=40, seed=3)
    found, _ = sweep.combinations(files, overrides, drawn)
    assert found == sweep.combinations(files, overrides, drawn)[0]
    rates = [float(dict(one.values)["sft.lr"]) for one in found]
    assert all(1e-7 <= rate <= 1e-4 for rate in rates)
    assert 5 < sum(rate < 3e-6 for rate in rates) < len(rates) - 5, "by their logarithms"


@pytest.mark.parametrize(
    ("vary", "random", "message"),
    [
        (("sft.lr=1e-6..1e-5",), None, "add --random N, or list the values: sft.lr=V1,V2"),
        (("sft.lr",), None, r"--vary sft.lr: expected KEY=V1,V2"),
        (("sft.lr=1e-5..1e-6",), 3, "KEY=LOW..HIGH, such as"),
        (("sft.lr=1,2", "sft.lr=3"), None, "a key is given twice"),
        (("sft.lrr=1,2",), None, r"unknown key sft.lrr; did you mean sft.lr\?"),
        (("sft.lr=1,x",), None, "sft.lr"),
        (("sft.lr=0.1,.1",), None, "would be one run|sft.lr"),
        (("run.seed=" + ",".join(map(str, range(40))), "sft.steps=" + ",".join(map(str, range(1, 40)))), None, "1560 combinations, at most 1000"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_tried_are_refused_before_a_run_starts(
    training: list[str], tmp_path: Path, vary: tuple[str, ...], random: int | None, message: str
) -> None:
    options = SweepOptions(vary=vary, command="sft", random=random)
    with pytest.raises(ConfigError, match=message):
        sweep.sweep(training, options, as_json=False)
    assert not _steps(tmp_path)


def test_a_run_is_as_good_as_its_held_out_result(tmp_path: Path) -> None:
    rows = [{"kind": "step", "step": step, "reward_mean": step / 10} for step in range(1, 9)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert sweep.score(tmp_path, "train", 4) == sweep.Score("reward", pytest.approx(0.25), 4)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        for step, accuracy in ((2, 0.5), (6, 0.4)):
            print(json.dumps({"kind": "eval", "step": step, "accuracy": accuracy}), file=file)
    assert sweep.score(tmp_path, "train", 4) == sweep.Score("accuracy", 0.5, 2)
    assert sweep.score(tmp_path, "train") == sweep.Score("accuracy", 0.4, 6)
    assert (
        sorted([sweep.Score("reward", value, 1) for value in (None, 0.2, 0.7)], key=lambda one: one.rank)[0].value
        == 0.7
    )
    assert (
        sorted([sweep.Score("eval_loss", value, 1) for value in (None, 0.2, 0.7)], key=lambda one: one.rank)[0].value
        == 0.2
    )
