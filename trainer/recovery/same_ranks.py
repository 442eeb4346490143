"""A checkpoint that DeepSpeed wrote is resumed on as many ranks: checked by the names of its files, before torch is imported.

Releases before wrote such ones; the shards of today are read by any number of ranks (`trainer/learner/shard_files.py`).
"""

from __future__ import annotations

from pathlib import Path

from penstock.protocol.errors import ConfigError
from penstock.protocol.record.checkpoint_state import PARTIAL


def check_same_ranks(run_folder: Path, num_ranks: int) -> None:
    """Raise ConfigError if DeepSpeed wrote the newest checkpoint of a run on another number of ranks.

    Every rank wrote its random state into it. A checkpoint without any is refused when it is loaded.
    """
    folders = sorted(one for one in (run_folder / "checkpoints").glob("step*") if not one.name.endswith(PARTIAL))
    if not folders or any(folders[-1].rglob("rank*.safetensors")):
        return
    written_by = len({file.name for file in folders[-1].rglob("random_state_*.bin")})
    if written_by and written_by != num_ranks:
        raise ConfigError(
            f"{folders[-1]} was written by {written_by} rank(s), and trainer.num_ranks = {num_ranks}: an earlier release "
            f"stored the optimizer in one part for each. Resume with trainer.num_ranks={written_by} until its next checkpoint, or start another run from its weights: "
            f"`penstock weights {run_folder.name}` lists them, `penstock weights export {run_folder.name} --version V --to "
            f"FOLDER` writes them, then `penstock train` with model.path=FOLDER and another run.id"
        )
