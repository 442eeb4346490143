"""What a client of one inference server provides: the interface between the worker and each engine's HTTP API.

Every method with a network call raises EngineError of the kind that fits. `AttachedEngine` and `ManagedEngine` are
written against this protocol, and the contract tests run against it.

Update modes: what happens to running generations when an engine loads new weights.

| mode       | running sequences                                           | tokens after the update read keys and values of   |
|------------|-------------------------------------------------------------|---------------------------------------------------|
| `drain`    | finish first; new requests wait for them                    | the new weights (no sequence spans two versions)  |
| `retract`  | are preempted, recomputed under the new weights, continue   | the new weights                                   |
| `in_place` | pause during the load and continue where they were          | the weights that computed each of them            |
| `abort`    | return what they have; the worker requests the rest         | the new weights                                   |

``auto`` drains while no running completion may have more than `LONG_TOKENS` tokens, else it is the engine's ``long_mode``
(`engine_kind.py`): the cheapest of its modes in which every token is known to be of one version. In every mode a token keeps the log-probability and the version that it was sampled with.

Metrics, by the worker's names; an engine that does not report one leaves it out.

| metric                         | of several engines | meaning                                    |
|--------------------------------|--------------------|--------------------------------------------|
| `engine_running`               | sum                | sequences decoding                         |
| `engine_slots`                 | sum                | sequences that can decode at once          |
| `engine_queued`                | sum                | sequences waiting                          |
| `engine_paused`                | sum                | sequences paused by an update              |
| `engine_tokens_per_s`          | sum                | tokens decoded per second                  |
| `engine_generated_tokens`      | sum                | tokens decoded since the engine started    |
| `engine_prompt_tokens`         | sum                | prompt tokens since the engine started     |
| `engine_cached_tokens`         | sum                | of these, found in the prefix cache        |
| `engine_aborted`               | sum                | requests aborted since the engine started  |
| `engine_retracted`             | sum                | sequences preempted since the start        |
| `engine_loads_patch`           | sum                | versions loaded as a patch, since the start |
| `engine_loads_chain`           | sum                | from the folder: no patches lead there     |
| `engine_loads_dense`           | sum                | from the folder: too many words changed    |
| `engine_loads_unmapped`        | sum                | from the folder: a word has no known place |
| `engine_loads_refused`         | sum                | from the folder: the server refused        |
| `engine_loads_unsupported`     | sum                | from the folder: the server takes none     |
| `engine_patch_bytes`           | sum                | touched inside pauses, for patches         |
| `engine_kv_usage`              | mean               | share of the key-value cache in use        |
| `engine_cache_hit_rate`        | mean               | share of prompt tokens found in the cache  |
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from penstock.protocol.groups import AbandonedCompletion, RowImages, Sampling
from penstock.protocol.versions import PolicyVersion, is_newer
from penstock.rollout_service.checks.check_task import ModelLimits
from penstock.rollout_service.engines.completion import Completion, EngineChecksum
from penstock.rollout_service.errors import TaskRefused

if TYPE_CHECKING:
    from penstock.rollout_service.engines.redundancy import Redundancy

UpdateMode = Literal["drain", "retract", "in_place", "abort"]
LONG_TOKENS = 128  # a completion that may be longer is not waited for by an update in the mode ``auto``
_SHARES = frozenset({"engine_kv_usage", "engine_cache_hit_rate"})
_SAMPLE = re.compile(r"^(\w+):(\w+)(?:\{.*\})? (\S+)", re.MULTILINE)


def mode_of(
    wanted: UpdateMode | Literal["auto"],
    serving: PolicyVersion | None,
    version: PolicyVersion,
    *,
    longest: int,
    long_mode: UpdateMode,
) -> UpdateMode:
    """Return the mode for an update from one version to another: always ``drain`` to an older one.

    ``longest`` is the most tokens that a running completion may have, ``long_mode`` what ``auto`` is where that is many.

    An older version is loaded for an evaluation that is pinned to it. Running generations are for training: tokens
    that they sampled from the older version would already be stale.
    """
    if serving is None or not is_newer(version, serving):
        return "drain"
    if wanted != "auto":
        return wanted
    return long_mode if longest > LONG_TOKENS else "drain"


@dataclass(frozen=True, slots=True, eq=False)
class ImagePrompt(Sequence[int]):
    token_ids: Sequence[int]
    images: RowImages
    data: Mapping[str, bytes]  # by sha256

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, at: Any) -> Any:
        return self.token_ids[at]

    def __iter__(self) -> Iterator[int]:
        return iter(self.token_ids)


def refuse_images(prompts: Sequence[Sequence[int]], engine: str) -> None:
    """Raise TaskRefused if a prompt has images, for an engine whose client sends none."""
    if any(isinstance(prompt, ImagePrompt) for prompt in prompts):
        raise TaskRefused(
            "images_unsupported",
            f"a prompt has images, and {engine} gets token ids alone: use the embedded engine or SGLang, or data without images",
        )


def read_samples(exposition: str, *, prefix: str, names: Mapping[str, str]) -> dict[str, float]:
    """Return the samples ``<prefix>:<name>`` of a page in Prometheus' text format, by the worker's ``names``.

    Samples of one name with other labels are added up, or averaged where the metric is a share.
    """
    samples: dict[str, list[float]] = {}
    for engine, name, text in _SAMPLE.findall(exposition):
        if engine == prefix and name in names:
            value = _number(text)
            if value is not None:
                samples.setdefault(names[name], []).append(value)
    return {name: _aggregate(name, values) for name, values in samples.items()}


def aggregate_metrics(engines: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name for metrics in engines for name in metrics}
    return {name: _aggregate(name, [metrics[name] for metrics in engines if name in metrics]) for name in sorted(names)}


def _aggregate(name: str, values: Sequence[float]) -> float:
    return sum(values) / len(values) if name in _SHARES else sum(values)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


class Generates(Protocol):
    """Samples completions: the client of one engine, or the router over several."""

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        n: int,
        adapter: PolicyVersion | None = None,
        seeds: Sequence[int] | None = None,
    ) -> list[list[Completion]]:
        """Sample ``n`` completions of every prompt, with the adapter of a version where one is named.

        ``seeds`` has one for each prompt; an engine that is deterministic then samples the same again.

        Returns one list of ``n`` for each prompt, in order. A completion that a weight update interrupts is continued
        until it is whole. Raises EngineError of the kind that fits: a reply is used as a whole or not at all. Raises
        TaskRefused, and sends nothing, for a request that no engine can serve, or that would crash one.
        """
        ...


@runtime_checkable
class PlacesEpisodes(Protocol):
    """Routes over several engines, and keeps the requests of an episode on one of them, which has their keys and values."""

    def placed(self) -> AbstractContextManager[Generates]:
        """Give one episode a place in the block: what is asked there goes to one engine, as long as that can be asked."""
        ...


@dataclass(frozen=True, slots=True)
class KeptCompletions:
    """The completions of one prompt that ended first, and the others that were started."""

    completions: list[Completion]
    abandoned: tuple[AbandonedCompletion, ...]


@runtime_checkable
class GeneratesRedundantly(Protocol):
    """Samples more completions than are kept: a client whose server ends single completions and says what it had sampled."""

    async def generate_redundantly(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        redundancy: Redundancy,
        adapter: PolicyVersion | None = None,
    ) -> list[KeptCompletions]:
        """Start ``redundancy.started`` completions of every prompt and return those that are kept; the rest is aborted.

        A prompt's completions are kept in the order of their numbers, not of their ends. Raises as `Generates.generate`.
        """
        ...


def able_to_abandon(client: Generates) -> GeneratesRedundantly:
    if not isinstance(client, GeneratesRedundantly):
        raise TaskRefused(
            "redundancy_unsupported",
            f"{type(client).__name__} cannot end a single completion and count what was sampled of it: set "
            "rollout.redundant_completions = 0, or use the embedded engine or SGLang",
        )
    return client


@dataclass(frozen=True, slots=True)
class ServerReport:
    objections: list[str] = field(default_factory=list)  # why it cannot be used; each names the flag
    untested_version: str = ""  # its version, where the contract tests never ran against it
    context_tokens: int | None = None  # the context it was limited to; None: the model's
    takes_adapters: bool = False


@runtime_checkable
class ReleasesMemory(Protocol):
    """An engine, or the client of one, that can free the memory of its device between two turns."""

    async def release(self, mode: UpdateMode) -> None:
        """Free the memory of weights, keys and values; the next load of weights allocates it again.

        New requests wait meanwhile, outside of their deadlines. Running ones end first in the mode ``drain``; in others they return
        what they have, and the rest is asked for after the load. Raises EngineError when the memory may not be free: then the
        server has to be killed.
        """
        ...


class EngineClient(Generates, Protocol):
    """One inference server. Requests run concurrently; weight operations run one at a time."""

    url: str
    limits: ModelLimits  # of the model that is served; requests beyond them are refused before they are sent

    async def close(self) -> None: ...

    async def inspect(self) -> ServerReport: ...

    async def started_with(self, folder: Path, version: PolicyVersion) -> None:
        """Note that the server was just started with the weights of a folder, and label them where it did not."""
        ...

    async def health(self) -> None: ...

    async def served_version(self) -> PolicyVersion | None:
        """Return the version that the server reports; None for a label that is not a policy version."""
        ...

    async def load_weights(self, folder: Path, version: PolicyVersion, mode: UpdateMode = "drain") -> None:
        """Load the weights of a folder and confirm the version; ``mode`` is what happens to running sequences.

        No request samples from cached keys and values of other weights unless ``mode`` is ``in_place``. Raises
        WeightsNotApplied when the server refuses or names another version afterwards: its weights are then unknown,
        and it must be loaded again or restarted.
        """
        ...

    async def weights_checksum(self) -> EngineChecksum | None:
        """Return the checksum of the served weights; None when the server reports none."""
        ...

    async def load_adapter(self, folder: Path, version: PolicyVersion) -> None:
        """Load an adapter next to the weights and all other adapters, without a pause; a loaded one stays as it is.

        Raises WeightsNotApplied when the server refuses it or does not list it afterwards.
        """
        ...

    async def unload_adapter(self, version: PolicyVersion) -> None:
        """Unload an adapter once no request of this worker uses it; return at once when it is not loaded."""
        ...

    async def drop_adapters(self) -> None:
        """Unload every adapter of a policy version that the server has, those of a previous worker included."""
        ...

    async def forget_lost_adapters(self) -> None:
        """Forget the adapters that the server no longer has, so that they can be loaded again."""
        ...

    async def metrics(self) -> dict[str, float]: ...

    def mark_unverified(self, reason: str) -> None:
        """Refuse running and new requests until `mark_verified`: the weights that sample them are unknown."""
        ...

    def mark_verified(self) -> None:
        """Accept requests again: the server confirmed what it serves."""
        ...
