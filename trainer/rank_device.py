"""The device of one rank that engines use too, in turns; `device_turns.py` decides when."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from penstock.protocol.config.shared_sections import PlacementSettings
from penstock.protocol.errors import ConfigError, DeviceNotFreed
from penstock.protocol.metrics.gpu import visible_gpus
from penstock.protocol.shared_device import POLL_S, SharedDevices
from penstock.trainer.ranks import Ranks


@dataclass(slots=True)
class RankDevice:
    """The device of one rank."""

    devices: SharedDevices
    deadline_s: float

    @classmethod
    def of(cls, placement: PlacementSettings, run_id: str, ranks: Ranks) -> RankDevice | None:
        """Claim this rank's device; None where the run takes no turns. Raises ConfigError and DeviceTaken."""
        if not placement.takes_turns:
            return None
        devices = placement.devices or tuple(gpu.uuid for gpu in visible_gpus(os.environ))
        if len(devices) <= ranks.local_rank:
            raise ConfigError(
                f'placement.shared = "turns": local rank {ranks.local_rank} of the trainer has no device among {list(devices)}; set '
                "placement.devices to one UUID for each rank of this host (nvidia-smi -L)"
            )
        shared = SharedDevices([devices[ranks.local_rank]], placement.lock_folder, role="trainer", run_id=run_id)
        return cls(shared.__enter__(), placement.turn_deadline_s)

    def wait(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Wait until this rank has its device; return False if ``should_stop``. Raises DeviceNotFreed after the deadline."""
        deadline = time.monotonic() + self.deadline_s
        while not (self.devices.try_want() and self.devices.try_take()):
            if should_stop():
                self.devices.give()
                return False
            if time.monotonic() > deadline:
                who = self.devices.holders()
                self.devices.give()
                raise DeviceNotFreed(
                    f"the trainer's turn did not come within placement.turn_deadline_s = {self.deadline_s:.0f} s; {who}. Look at that "
                    "process's log, and end it if it hangs"
                )
            time.sleep(POLL_S)
        return True
