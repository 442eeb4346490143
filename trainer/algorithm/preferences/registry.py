"""Where preference losses are found: the files of this package, user code by import path or file, or an entry point."""

from __future__ import annotations

from typing import Any, Final

from penstock.protocol.extensions import Registry
from penstock.trainer.algorithm.preferences.interface import PreferenceLoss

PREFERENCE_LOSSES: Final[Registry[PreferenceLoss[Any]]] = Registry(
    "preference loss",
    PreferenceLoss,
    package="penstock.trainer.algorithm.preferences",
    group="penstock.preference_losses",
)
