"""A run folder that some ranks do not see is refused on every rank."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from penstock.protocol.errors import ConfigError
from penstock.trainer.preflight import check_shared


class Threads:
    """Two ranks as threads, with the three calls that the check makes."""

    num_ranks = 2

    def __init__(self, rank: int, meet: Barrier, said: dict[str, Any]) -> None:
        self.rank, self.is_leader = rank, rank == 0
        self._meet, self._said = meet, said

    def broadcast(self, order: Any) -> Any:
        if self.is_leader:
            self._said["order"] = order
        self._meet.wait(60.0)
        return self._said["order"]

    def sum(self, values: list[float]) -> list[float]:
        self._said[str(self.rank)] = values[0]
        self._meet.wait(60.0)
        return [self._said["0"] + self._said["1"]]


@pytest.mark.parametrize("second", ["shared", "own"])
def test_every_rank_must_see_the_folder_of_rank_0(tmp_path: Path, second: str) -> None:
    meet, said = Barrier(2), dict[str, Any]()
    folders = [tmp_path / "shared", tmp_path / second]
    with ThreadPoolExecutor(2) as pool:
        checks: list[Any] = [
            pool.submit(check_shared, folder, Threads(rank, meet, said), deadline_s=0.2)  # type: ignore[arg-type]
            for rank, folder in enumerate(folders)
        ]
        for check in checks:
            if second == "shared":
                check.result()
            else:
                with pytest.raises(
                    ConfigError, match="is seen by 1 of 2 ranks; every rank writes its part of a checkpoint"
                ):
                    check.result()
    assert list((tmp_path / "shared").iterdir()) == []
