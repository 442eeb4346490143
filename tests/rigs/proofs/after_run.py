"""Type every command about a run after `penstock train --local` has ended, in the order of the README. `make proof NAME=after-run`.

    python -m tests.rigs.proofs.after_run [FOLDER]

A run of twelve steps of the quickstart's model; then each command in a process of its own, with no service running. Prints
a line for each command, with its exit code and seconds; exit code 1 when one ends otherwise than it should.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from tests.rigs.proofs.proof import Proof, folder_of, plain_environ
from tests.small_run import write_small_run

_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(a == b for a, b in zip(solution_str, ground_truth)) / 8
"""
_GRADER = {
    "type": "string_check",
    "name": "grader",
    "input": "{{ sample.output_text }}",
    "reference": "1",
    "operation": "eq",
}

# command, exit code, and a text that it prints
_COMMANDS: tuple[tuple[str, int, str], ...] = (
    ("runs", 0, "first"),
    ("runs show first", 0, "first"),
    ("watch first --plain", 0, ""),
    ("chat first --prompt 12345678", 0, ""),
    ("audit first", 0, ""),
    ("lineage first", 0, "version"),
    ("lineage first --version 8", 0, ""),
    ("replay first", 0, ""),
    ("reward list", 0, "exact_match"),
    ("reward test exact_match", 0, "scored by"),
    ("reward test strict --serve strict.py --data data/eval.jsonl -n 4", 0, ""),
    ("reward errors first", 0, ""),
    ("rescore first --serve strict.py", 0, "next: penstock train"),
    ("rescore first --serve grader.json", 0, "first-grader"),
    ("rescore first --reward strikt", 1, "strikt"),
    ("rescore first --reward qa_f1 --into by-f1", 0, "by-f1"),
    ("rescore first --weights reward=0.5 --into halved", 0, "halved"),
    ("dead-letters list first", 0, ""),
    ("dead-letters resend first --all", 0, ""),
    ("weights first", 0, "best"),
    ("weights export first --best --to best", 0, "best"),
    ("weights export first --version 99 --to none", 1, "stored: "),
    ("chat first --model best --prompt 12345678", 0, ""),
    ("train run.toml --local run.id=second data.from_run=nosuch eval.every=0", 1, "first-strict"),
    ("train run.toml --local run.id=second data.from_run=first-strict eval.every=0", 0, "report:"),
    ("runs show second", 0, "second"),
    ("audit second", 0, ""),
    ("replay second", 0, ""),
    ("rescore second --weights reward=2", 0, "second-weighed"),
    ("train run.toml --local", 0, "finished"),
    ("runs rm second --yes --folder --force", 0, ""),
)


def main() -> int:
    folder = folder_of("after-run")
    if not (folder / "run.toml").exists():
        write_small_run(
            folder,
            "first",
            trainer={"steps": 12, "milestone_every": 2},
            eval={"every": 4},
            rollout={"max_new_tokens": 10},
        )
        (folder / "strict.py").write_text(_REWARD)
        (folder / "grader.json").write_text(json.dumps(_GRADER))
    failed = _run(folder, "train run.toml --local", 0, "report:")
    for command, code, text in _COMMANDS:
        failed += _run(folder, command, code, text)
    print(
        f"{failed} of {len(_COMMANDS) + 1} commands ended otherwise than they should; all output is in {folder}/output"
    )
    return int(failed > 0)


def _run(folder: Path, command: str, code: int, text: str) -> int:
    started = time.monotonic()
    ended = Proof(folder, plain_environ()).ask(*command.split())
    output = ended.stdout + ended.stderr
    ok = ended.returncode == code and " ".join(text.split()) in " ".join(output.split())
    print(
        f"{'ok ' if ok else 'BAD'} {ended.returncode:>3} {time.monotonic() - started:6.1f} s  penstock {command}",
        flush=True,
    )
    with (folder / "output").open("a") as file:
        file.write(f"\n$ penstock {command}\n{output}[{ended.returncode}]\n")
    if not ok:
        print("    " + "\n    ".join(output.splitlines()[-12:]), flush=True)
    return int(not ok)


if __name__ == "__main__":
    sys.exit(main())
