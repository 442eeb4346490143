"""How far the losses and gradient norms of `penstock sft`, `dpo` and `rm` are from TRL's, over all 50 steps. `make proof NAME=trl-curves`.

    python -m tests.rigs.trl_curves             # about two minutes of CPU time; TRL is not needed
    python -m tests.rigs.trl_curves dpo/ipo rm

The recorded curves, and how they were made: `tests/rigs/trl_record.py`. Exit code 1 if a loss is further than 1e-5 from TRL's (IPO,
whose losses are near 25: 2e-5) or a norm further than 1e-4 of it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import structlog
import torch

from penstock.deploy.quickstart_task import write_model
from penstock.trainer.ranks import Ranks
from tests.fine_tuning import check
from tests.fine_tuning.trl_rows import write_labelled, write_pairs, write_turns

_RECORDED = Path(__file__).resolve().parents[2] / "tests" / "data" / "trl" / "curves.json"
_LOSS, _NORM = {"dpo/ipo": 2e-5}, 1e-4


def main() -> int:
    """Train, and print a row for each curve."""
    recorded = json.loads(_RECORDED.read_text())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", metavar="NAME", nargs="*", choices=list(recorded), help="curves; all if left out")
    names = parser.parse_args().names or list(recorded)
    torch.set_num_threads(1)
    num_apart, ranks = 0, Ranks()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    print("| training | steps | largest difference of a loss | of a gradient norm, relative |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="penstock-curves-") as scratch:
        folder = Path(scratch)
        write_model(folder / "model", seed=0)
        write_turns(folder / "turns.jsonl")
        write_pairs(folder / "pairs.jsonl")
        write_pairs(folder / "held_out_pairs.jsonl")
        write_labelled(folder / "labelled.jsonl")
        write_labelled(folder / "held_out_labelled.jsonl", seed=1, num=20)
        for name in names:
            steps: list[dict[str, Any]] = check.curve(folder, ranks, name, is_whole=True)["steps"]
            theirs = recorded[name]
            loss = max(abs(line["loss"] - value) for line, value in zip(steps, theirs["losses"], strict=True))
            norm = max(
                abs(line["grad_norm"] / value - 1) for line, value in zip(steps, theirs["grad_norms"], strict=True)
            )
            num_apart += loss > _LOSS.get(name, 1e-5) or norm > _NORM
            print(f"| {name} | {len(steps)} | {loss:.1e} | {norm:.1e} |", flush=True)
    return 1 if num_apart else 0


if __name__ == "__main__":
    sys.exit(main())
