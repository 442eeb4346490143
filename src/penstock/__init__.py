"""Asynchronous reinforcement learning of language models: services that communicate only through NATS and S3.

The public interface is what ``__all__`` names, the `penstock` command, the run file, and the wire and storage formats
of `penstock.protocol`. What a kind of extension implements is public in its own module (``docs/extending.md`` lists it);
every other module is private and may change in any release.

The packages below this name are links to the folders at the top of the repository. Names are resolved when they are
used, so that ``import penstock`` imports nothing else.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.agents.environments.episode_environment import PlayOptions as PlayOptions
    from penstock.agents.environments.play import Play as Play
    from penstock.agents.environments.play import Reply as Reply
    from penstock.agents.environments.play import Row as Row
    from penstock.agents.environments.play import done as done
    from penstock.agents.environments.play import say as say
    from penstock.agents.environments.tools.tool import Tool as Tool
    from penstock.agents.environments.tools.tool import ToolArguments as ToolArguments
    from penstock.agents.environments.tools.tool import ToolEpisode as ToolEpisode
    from penstock.agents.environments.tools.tool import ToolError as ToolError
    from penstock.agents.environments.tools.tool import ToolUnavailable as ToolUnavailable
    from penstock.agents.environments.turn_environment import TurnEnvironment as TurnEnvironment
    from penstock.agents.proxy.messages import Message as Message
    from penstock.agents.proxy.messages import ToolCall as ToolCall
    from penstock.client.async_client import AsyncClient as AsyncClient
    from penstock.client.async_client import AsyncFineTuning as AsyncFineTuning
    from penstock.client.async_client import AsyncRun as AsyncRun
    from penstock.client.client import Client as Client
    from penstock.client.events import Event as Event
    from penstock.client.handles import FineTuning as FineTuning
    from penstock.client.handles import Run as Run
    from penstock.client.metrics import Metrics as Metrics
    from penstock.client.processes import RunFailed as RunFailed
    from penstock.console.tracking.metrics_log import DualLogger as DualLogger
    from penstock.console.tracking.metrics_log import MetricsLog as MetricsLog
    from penstock.console.tracking.metrics_log import init_logging as init_logging
    from penstock.protocol.errors import ConfigError as ConfigError
    from penstock.protocol.errors import PenstockError as PenstockError
    from penstock.protocol.extensions import Extension as Extension
    from penstock.protocol.extensions import Registry as Registry
    from penstock.protocol.groups import Sampling as Sampling
    from penstock.protocol.groups import Task as Task
    from penstock.protocol.trajectory import Trajectory as Trajectory
    from penstock.rollout_service.engines.completion import Completion as Completion
    from penstock.rollout_service.engines.completion import EngineChecksum as EngineChecksum
    from penstock.rollout_service.engines.engine_client import EngineClient as EngineClient
    from penstock.rollout_service.engines.engine_client import ServerReport as ServerReport
    from penstock.rollout_service.engines.engine_kind import EngineKind as EngineKind
    from penstock.rollout_service.engines.engine_kind import ServerLaunch as ServerLaunch
    from penstock.rollout_service.environments.environment import Environment as Environment
    from penstock.rollout_service.environments.environment import Sampler as Sampler
    from penstock.trainer.algorithm.corrections.interface import Correction as Correction
    from penstock.trainer.algorithm.corrections.interface import Drift as Drift
    from penstock.trainer.algorithm.corrections.interface import correction as correction
    from penstock.trainer.algorithm.estimators.interface import Estimator as Estimator
    from penstock.trainer.algorithm.estimators.interface import Outcomes as Outcomes
    from penstock.trainer.algorithm.estimators.interface import StdNormalisation as StdNormalisation
    from penstock.trainer.algorithm.estimators.interface import advantage_estimator as advantage_estimator
    from penstock.trainer.algorithm.filters.interface import Candidate as Candidate
    from penstock.trainer.algorithm.filters.interface import Filter as Filter
    from penstock.trainer.algorithm.filters.interface import trajectory_filter as trajectory_filter
    from penstock.trainer.algorithm.group_filters.interface import GroupCandidate as GroupCandidate
    from penstock.trainer.algorithm.group_filters.interface import GroupFilter as GroupFilter
    from penstock.trainer.algorithm.group_filters.interface import group_filter as group_filter
    from penstock.trainer.algorithm.losses.interface import ClipRange as ClipRange
    from penstock.trainer.algorithm.losses.interface import DualClip as DualClip
    from penstock.trainer.algorithm.losses.interface import Loss as Loss
    from penstock.trainer.algorithm.losses.interface import LossTerms as LossTerms
    from penstock.trainer.algorithm.losses.interface import Options as Options
    from penstock.trainer.algorithm.losses.interface import Sequences as Sequences
    from penstock.trainer.algorithm.losses.interface import Tokens as Tokens
    from penstock.trainer.algorithm.losses.interface import WeightCap as WeightCap
    from penstock.trainer.algorithm.losses.interface import none_of as none_of
    from penstock.trainer.algorithm.losses.interface import policy_loss as policy_loss

__version__ = "0.1.0"

# The public names of each module that defines some. tests/packaging/test_public_interface.py has each with its signature.
_NAMES = {
    "penstock.agents.environments.episode_environment": ("PlayOptions",),
    "penstock.agents.environments.play": ("Play", "Reply", "Row", "done", "say"),
    "penstock.agents.environments.tools.tool": ("Tool", "ToolArguments", "ToolEpisode", "ToolError", "ToolUnavailable"),
    "penstock.agents.environments.turn_environment": ("TurnEnvironment",),
    "penstock.agents.proxy.messages": ("Message", "ToolCall"),
    "penstock.client.async_client": ("AsyncClient", "AsyncFineTuning", "AsyncRun"),
    "penstock.client.client": ("Client",),
    "penstock.client.events": ("Event",),
    "penstock.client.handles": ("FineTuning", "Run"),
    "penstock.client.metrics": ("Metrics",),
    "penstock.client.processes": ("RunFailed",),
    "penstock.console.tracking.metrics_log": ("DualLogger", "MetricsLog", "init_logging"),
    "penstock.protocol.errors": ("ConfigError", "PenstockError"),
    "penstock.protocol.extensions": ("Extension", "Registry"),
    "penstock.protocol.groups": ("Sampling", "Task"),
    "penstock.protocol.trajectory": ("Trajectory",),
    "penstock.rollout_service.engines.completion": ("Completion", "EngineChecksum"),
    "penstock.rollout_service.engines.engine_client": ("EngineClient", "ServerReport"),
    "penstock.rollout_service.engines.engine_kind": ("EngineKind", "ServerLaunch"),
    "penstock.rollout_service.environments.environment": ("Environment", "Sampler"),
    "penstock.trainer.algorithm.corrections.interface": ("Correction", "Drift", "correction"),
    "penstock.trainer.algorithm.estimators.interface": (
        "Estimator",
        "Outcomes",
        "StdNormalisation",
        "advantage_estimator",
    ),
    "penstock.trainer.algorithm.filters.interface": ("Candidate", "Filter", "trajectory_filter"),
    "penstock.trainer.algorithm.group_filters.interface": ("GroupCandidate", "GroupFilter", "group_filter"),
    "penstock.trainer.algorithm.losses.interface": (
        "ClipRange",
        "DualClip",
        "Loss",
        "LossTerms",
        "Options",
        "Sequences",
        "Tokens",
        "WeightCap",
        "none_of",
        "policy_loss",
    ),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
# Type checkers read the public names from the imports above.
__all__ = sorted(("__version__", *_MODULES))  # noqa: PLE0605  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import the module of a public name; raises AttributeError for any other name."""
    if name not in _MODULES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}; public are {', '.join(__all__)}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
