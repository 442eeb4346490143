"""Train twelve runs with one planted failure each, and healthy ones: does the report name the cause? `make proof NAME=planted-failures`.

    python -m tests.rigs.planted_failures [--only NAME ...] [--healthy 20] [--folder FOLDER]

Each failure is a run of twenty steps of the quickstart's model, warmed up on examples, through every service (40 seconds of CPU
time); it is found when the first diagnosis has its key. A healthy run is twenty steps in this process (9 seconds), with the
trainer's loss and formulas, and must have none. Runs that are in the folder already are read again. Exit code 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import staleness

from penstock.console.live.run_view import RunView
from penstock.console.report import curves
from penstock.deploy import quickstart_task
from tests.small_run import PENSTOCK, write_run_file

STEPS, _GROUPS, _TRAIN_S = 20, 16, 600
_HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    "
_SHARE = "return sum(a == b for a, b in zip(solution_str, {0})) / 8\n"
_SKEWED = """\
import dataclasses
from penstock.rollout_service.engines.embedded import EMBEDDED, EmbeddedClient

class Skewed(EmbeddedClient):  # as a server that samples at one temperature and reports another one's log-probabilities
    async def _sample(self, sequences, request):
        return [dataclasses.replace(c, logprobs=[0.7 * p for p in c.logprobs]) for c in await super()._sample(sequences, request)]

SKEWED = dataclasses.replace(EMBEDDED, name="skewed", connect=Skewed)
"""


@dataclass(frozen=True)
class Planted:
    """A failure: what it changes in the healthy run, and the diagnosis that names it."""

    key: str
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    reward: str = ""  # body of the reward function, in place of exact_match
    spoil: Callable[[Path], None] = lambda folder: None  # changes model or data


def _other_template(folder: Path) -> None:
    (folder / "model" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )


def _other_stop_token(folder: Path) -> None:
    changed = {
        "config.json": {"eos_token_id": 0},
        "generation_config.json": {"eos_token_id": 0},
        "tokenizer_config.json": {"eos_token": "<|endoftext|>"},
    }
    for name, keys in changed.items():
        file = folder / "model" / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))


def _one_prompt(folder: Path) -> None:
    file = folder / "data" / "train.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text(lines[0] * len(lines))


def _skewed_engine(folder: Path) -> None:
    (folder / "skewed.py").write_text(_SKEWED)


PLANTED: dict[str, Planted] = {
    "entropy": Planted("entropy", {"trainer": {"lr": 3e-3}, "rollout": {"max_staleness": 0}},
                       "return (solution_str[:8].count('1') - 4 * (len(solution_str) > 8)) / 8\n"),
    "length drift": Planted("length_drift", {"rollout": {"max_new_tokens": 64}, "trainer": {"lr": 2e-3}},
                            "return min(len(solution_str), 64) / 64\n"),
    "leaky grader": Planted(
        "hacked",
        {"trainer": {"lr": 2e-3}, "reward": {
            "name": "leaky", "success": {"leaky": {"exact": 1.0}},
            "define": {"leaky": {"parts": {"exact": {"reward": "exact_match", "weight": 0.0}, "found": {"reward": "reward.py:compute_score"}}}},
        }},
        "return float(solution_str.count('1') >= 3)\n",
    ),
    "engine mismatch": Planted("engine_gap", {"worker": {"engine": "skewed.py:SKEWED"}, "trainer": {"max_mismatch": "none"}}, "", _skewed_engine),
    "no signal": Planted("constant_reward", reward="return 0.5\n"),
    "learning rate": Planted("lr_too_high", {"trainer": {"lr": 3e-2}}),
    "stop token": Planted("never_ends", spoil=_other_stop_token),
    "reward fails": Planted("reward_fails", {"trainer": {"collect_deadline_s": 40.0}}, "raise ConnectionError('the judge does not answer')\n"),
    "stale only": Planted("stale", {"rollout": {"max_staleness": 16}, "algorithm": {"name": "reinforce"}, "trainer": {"lr": 1e-3, "keep_versions": 20}}),
    "chat template": Planted("not_understood", spoil=_other_template),
    "one prompt": Planted("memorised", {"trainer": {"lr": 1e-3}}, _SHARE.format("ground_truth"), _one_prompt),
    "kl": Planted("kl_reference", {"trainer": {"lr": 2e-3}, "algorithm": {"kl_coefficient": 1e-6}}, _SHARE.format("'12345678'")),
}  # fmt: skip


def _healthy(seed: int, base: Path) -> RunView:
    """Return a run that learns, in this process: another seed, age of the samples and learning rate each time."""
    task = replace(staleness.TASKS["sort"], prompts=_GROUPS // 2, sft_steps=60, num_eval=100, warm_seed=0)
    file = base / f"healthy-{seed}.jsonl"
    if not file.exists():
        rows: list[dict[str, Any]] = []
        lag, lr = ("0", "1", "2", "4", "8")[seed % 5], (2e-4, 5e-4)[seed % 2]
        rule = staleness.METHODS["default"]
        staleness.train(task, rule, lag, seed, steps=STEPS, cache=base, lr=lr, rows=rows)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    view = RunView(f"healthy-{seed}", total_steps=STEPS)
    view.add_recorded(map(json.loads, file.read_text().splitlines()))
    return view


def _warm_up(base: Path) -> None:
    quickstart_task.write_data(base / "data", seed=0, num_sft=60 * 128, num_train=STEPS * _GROUPS, num_eval=64)
    quickstart_task.write_model(base / "start", seed=0)
    warm = {"data": str(base / "data" / "sft.jsonl"), "steps": 60, "batch_size": 128, "lr": 3e-3, "betas": [0.9, 0.98],
            "warmup_steps": 20, "output": str(base / "model")}  # fmt: skip
    file = write_run_file(base, "warm", model={"path": str(base / "start")}, sft=warm, trainer={"lr": 3e-3})
    subprocess.run([*PENSTOCK, "sft", str(file)], check=True, cwd=base, capture_output=True)


def _train(base: Path, run_id: str, planted: Planted) -> None:
    folder = base / run_id
    for name in ("model", "data"):
        shutil.copytree(base / name, folder / name)
    if planted.reward:
        (folder / "reward.py").write_text(_HEAD + planted.reward)
    planted.spoil(folder)
    files = {name: str(folder / "data" / f"{name}.jsonl") for name in ("train", "eval")}
    settings: dict[str, Mapping[str, Any]] = {
        "data": {**files, "max_prompt_tokens": 48},
        "rollout": {"groups_per_step": _GROUPS, "group_size": 8, "max_staleness": 2, "max_new_tokens": 12},
        "reward": {"name": "reward.py:compute_score" if planted.reward else "exact_match"},
        "trainer": {"steps": STEPS, "lr": 5e-4, "betas": [0.9, 0.98]},
        "eval": {"every": 5},
    }
    names = dict.fromkeys((*settings, *planted.sections))
    file = write_run_file(folder, run_id, **{n: {**settings.get(n, {}), **planted.sections.get(n, {})} for n in names})
    command = [*PENSTOCK, "train", str(file), "--local", "--workers", "1", "--json"]
    with (folder / "output").open("w") as output:
        subprocess.run(command, cwd=folder, stdout=output, stderr=output, timeout=_TRAIN_S, check=False)


def found_in(base: Path, run_id: str) -> list[tuple[str, str]]:
    """Return the diagnoses of a run as key and text; of one that made no step, what `penstock train` printed."""
    view = RunView(run_id, total_steps=STEPS)
    view.add_recorded(curves.rows(base / run_id / "runs" / run_id))
    if view.steps:
        return _texts(view)
    output = (base / run_id / "output").read_text()
    return [
        ("reward_fails", line) for line in output.splitlines() if "problem: No step is made, as rewards fail" in line
    ]


def _texts(view: RunView) -> list[tuple[str, str]]:
    return [(one.key, f"{one.what} {one.cause}") for one in view.summary().diagnoses]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", nargs="*", choices=PLANTED, default=list(PLANTED), help="failures")
    parser.add_argument("--healthy", metavar="N", type=int, default=20, help="how many healthy runs")
    parser.add_argument(
        "--folder", type=Path, help="holds what it writes; runs that are there are read; a new one if left out"
    )
    options = parser.parse_args()
    base = (options.folder or Path(tempfile.mkdtemp(prefix="planted-"))).absolute()
    base.mkdir(parents=True, exist_ok=True)
    if not (base / "model").exists() and options.only:
        _warm_up(base)
    failed = 0
    for name in options.only:
        run_id, planted = name.replace(" ", "-"), PLANTED[name]
        if not (base / run_id).exists():
            _train(base, run_id, planted)
        failed += _show(name, planted.key, found_in(base, run_id))
    for seed in range(options.healthy):
        failed += _show(f"healthy {seed}", "", _texts(_healthy(seed, base)))
    print(f"{failed} of {len(options.only) + options.healthy} runs are not diagnosed as they should be; {base}")
    return int(failed > 0)


def _show(name: str, key: str, found: list[tuple[str, str]]) -> bool:
    """Print what was found in a run; return whether that is wrong: another first diagnosis, or any in a healthy run."""
    is_wrong = [one for one, _ in found[:1]] != ([key] if key else [])
    print(f"{'BAD' if is_wrong else 'ok '} {name:16} {', '.join(one for one, _ in found) or '–'}", flush=True)
    for _, text in found[:1]:
        print(f"      {text}", flush=True)
    return is_wrong


if __name__ == "__main__":
    sys.exit(main())
