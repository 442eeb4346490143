"""Where each kind of part is found: one file of its package, user code by import path or file, or an entry point."""

from __future__ import annotations

from typing import Any, Final

from penstock.protocol.extensions import Registry
from penstock.trainer.algorithm.corrections.interface import Correction
from penstock.trainer.algorithm.estimators.interface import Estimator
from penstock.trainer.algorithm.filters.interface import Filter
from penstock.trainer.algorithm.group_filters.interface import GroupFilter
from penstock.trainer.algorithm.losses.interface import Loss

LOSSES: Final[Registry[Loss[Any]]] = Registry(
    "loss", Loss, package="penstock.trainer.algorithm.losses", group="penstock.losses"
)
ESTIMATORS: Final[Registry[Estimator[Any]]] = Registry(
    "advantage estimator", Estimator, package="penstock.trainer.algorithm.estimators", group="penstock.estimators"
)
FILTERS: Final[Registry[Filter[Any]]] = Registry(
    "trajectory filter", Filter, package="penstock.trainer.algorithm.filters", group="penstock.filters"
)
GROUP_FILTERS: Final[Registry[GroupFilter[Any]]] = Registry(
    "group filter", GroupFilter, package="penstock.trainer.algorithm.group_filters", group="penstock.group_filters"
)
CORRECTIONS: Final[Registry[Correction[Any]]] = Registry(
    "correction", Correction, package="penstock.trainer.algorithm.corrections", group="penstock.corrections"
)
ALL: Final[tuple[Registry[Any], ...]] = (LOSSES, ESTIMATORS, FILTERS, GROUP_FILTERS, CORRECTIONS)
