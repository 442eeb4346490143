"""Train a tiny model to tell the colour of pictures, through every service on this machine; then audit and replay the run.

python -m benchmarks.pictures [--steps 40] [--seed 3] [--folder FOLDER] [--set section.key=value ...]

Qwen2.5-VL with random weights, made on the spot, answers with one token; a reward counts its first character as even or odd. All
prompts have the same text, and held-out pictures have other sizes and noise, so only who sees them is right more often than
half of the time. Prints one JSON line for each evaluation, and one for audit, replay and the largest difference of a log-probability between engine
and trainer; exits with 1 unless the last evaluation is right in 90 %.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tests.pictures import picture_bytes
from tests.vision_model import build_vision_model

COLOURS = {"red": (200, 40, 40), "blue": (40, 40, 200)}
_REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Even first characters are right for red, odd ones for blue; none is wrong."""
    return float(bool(solution_str) and ord(solution_str[0]) % 2 == (ground_truth == "blue"))
'''


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where the run is kept; default: a folder that is removed"
    )
    parser.add_argument("--set", nargs="*", default=[], help="further settings of the run")
    options = parser.parse_args()
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
        return _run(options.folder.absolute(), options)
    with tempfile.TemporaryDirectory(prefix="pictures-") as made:
        return _run(Path(made), options)


def _run(folder: Path, options: argparse.Namespace) -> int:
    build_vision_model(folder / "model", seed=options.seed)
    random = np.random.default_rng(options.seed)
    for name, count in (("train", 64), ("held_out", 32)):
        _write_rows(folder, name, count, random)
    (folder / "colours.py").write_text(_REWARD)
    (folder / "run.toml").write_text(f"""
        run = {{ id = "pictures", dir = "{folder}/runs", seed = {options.seed} }}
        model.path = "{folder}/model"
        data = {{ train = "{folder}/train.jsonl", eval = "{folder}/held_out.jsonl", max_prompt_tokens = 256 }}
        rollout = {{ groups_per_step = 8, group_size = 16, max_new_tokens = 1, max_staleness = 1 }}
        reward.name = "colours"
        trainer = {{ steps = {options.steps}, lr = 3e-3 }}
        eval = {{ every = {max(1, options.steps // 8)}, temperature = 1.0, samples = 4 }}
    """)
    _penstock(folder, "train", "run.toml", "--local", "--workers", "1", "--serve", "colours.py", *options.set)
    metrics = folder / "runs/pictures/metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    found = [{"step": one["step"], "reward": one["reward_mean"]} for one in lines if one["kind"] == "eval"]
    mismatch = max(one["mismatch"]["max_abs"] for one in lines if one["kind"] == "step" and "mismatch" in one)
    for one in found:
        print(json.dumps(one))
    where = f"run.dir={folder}/runs"
    audit = json.loads(_penstock(folder, "audit", "pictures", where, "--json"))
    verdict = json.loads(_penstock(folder, "replay", "pictures", where, "--json").splitlines()[-1])
    closed = {"breaches": audit["breaches"], "difference": verdict["difference"], "steps": verdict["num_steps"]}
    print(json.dumps({**closed, "mismatch": mismatch}))
    return int(found[-1]["reward"] < 0.9 or bool(audit["breaches"]) or verdict["difference"] is not None)


def _write_rows(folder: Path, name: str, count: int, random: np.random.Generator) -> None:
    """Write rows that name pictures of either colour, each with noise and a size of its own."""
    (folder / name).mkdir(exist_ok=True)
    rows: list[dict[str, Any]] = []
    for number in range(count):
        colour = list(COLOURS)[number % 2]
        height, width = random.integers(16, 64, size=2)
        values = np.array(COLOURS[colour]) + random.normal(0.0, 20.0, size=(height, width, 3))
        image = Image.fromarray(values.clip(0, 255).astype(np.uint8))
        (folder / name / f"{number}.png").write_bytes(picture_bytes(image))
        content = [{"type": "image", "image": f"{name}/{number}.png"}, {"type": "text", "text": "which colour?"}]
        rows.append(
            {"messages": [{"role": "user", "content": content}], "ground_truth": colour, "data_source": "colours"}
        )
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _penstock(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *words], cwd=folder, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"penstock {' '.join(words)} ended with {done.returncode}: {done.stdout[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
