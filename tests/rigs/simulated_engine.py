"""An engine that only takes time: the embedded engine's server and scheduler around a runner that sleeps instead of computing.

    worker.engine = "tests.rigs.simulated_engine:SIMULATED"
    worker.engine_options = { slots = 8, step_s_full = 0.016, median_tokens = 48 }

HTTP API, queue, pauses, update modes, versions of tokens, aborts and adapters are those of the embedded engine, by its own
code, and so pass the contract tests. Lengths follow from the prompt (`LengthMix`), durations from how many sequences run
(`EnginePace`); a prompt is computed once, as with SGLang's prefix cache; tokens are arbitrary. A share of the requests may
fail. A worker starts it as it starts the embedded one.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import json
import math
import os
import random
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from pydantic import Field

from penstock.deploy.plan.simulation import EnginePace, LengthMix
from penstock.protocol.config.connection import Section
from penstock.protocol.errors import MalformedWeights
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.layout import weights_digest
from penstock.rollout_service.embedded_engine.caches import PrefixCache
from penstock.rollout_service.embedded_engine.engine_thread import EngineThread
from penstock.rollout_service.embedded_engine.errors import CheckpointRefused
from penstock.rollout_service.embedded_engine.http.app import build_app
from penstock.rollout_service.embedded_engine.http.bodies import ImageReader
from penstock.rollout_service.embedded_engine.http.build_job import ServedModel, Text
from penstock.rollout_service.embedded_engine.http.server_state import AdapterRegistry, JobRunner, ServerState
from penstock.rollout_service.embedded_engine.model.model_config import read_eos_token_ids, read_model_config
from penstock.rollout_service.embedded_engine.process import EngineSettings, exit_with_parent
from penstock.rollout_service.embedded_engine.scheduler import Limits
from penstock.rollout_service.embedded_engine.sequence import FinishReason, Prefix, Sequence
from penstock.rollout_service.engines.engine_kind import EngineKind, ServerLaunch
from penstock.rollout_service.engines.sglang.client import SglangClient
from tests.safetensors_digests import safetensors_digests

if TYPE_CHECKING:
    from penstock.rollout_service.embedded_engine.model.low_rank import Adapter

_STRIDE_S = 0.04  # commands and new requests wait for the stride under way
_TRACE_S = 0.2
_LATE_S = 0.1
_NUM_RANDOM = 8192
_CACHED_PROMPTS = 256  # a group's sequences start one by one, as slots become free


class SimulatedOptions(Section):
    """What the engine simulates; all seconds are of the real clock."""

    engines: int = Field(default=1, ge=1, description="Servers of the worker.")
    slots: int = Field(default=16, ge=1, description="Sequences that decode together.")
    step_s_alone: float = Field(default=0.007, gt=0, description="Seconds of a decode step of one sequence.")
    step_s_full: float = Field(default=0.02, gt=0, description="Seconds of a decode step of all slots.")
    prompt_s: float = Field(default=0.02, ge=0, description="Seconds that a prompt takes.")
    load_s: float = Field(default=0.1, ge=0, description="Seconds that loading weights takes.")
    median_tokens: float = Field(default=48, ge=1, description="Median length of a completion.")
    longest_tokens: int = Field(default=1024, ge=1, description="Longest completion, unless the request allows less.")
    fail_share: float = Field(default=0.0, ge=0, lt=1, description="Share of the sequences that end with an error.")
    trace: str = Field(default="", description="Folder for a file with what the engine did over time; empty: none.")

    @property
    def mix(self) -> LengthMix:
        return LengthMix(self.median_tokens, self.longest_tokens)

    @property
    def pace(self) -> EnginePace:
        return EnginePace(self.slots, self.step_s_alone, self.step_s_full, self.prompt_s)


def _launches(options: SimulatedOptions, environ: Mapping[str, str]) -> list[ServerLaunch]:
    def command(folder: Path, version: PolicyVersion, port_file: Path) -> list[str]:
        # without -P: the benchmarks are imported from the working directory
        arguments = [str(folder), str(version), str(port_file), str(os.getpid()), options.model_dump_json()]
        return [sys.executable, "-m", "tests.rigs.simulated_engine", *arguments]

    return [ServerLaunch(command, f"engine-{number}.log") for number in range(options.engines)]


SIMULATED = EngineKind("simulated", SglangClient, _launches, options=SimulatedOptions, long_mode="in_place")


@dataclass(frozen=True, slots=True)
class SimulatedWeights:
    checksum: str


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedAdapter:
    name: str
    path: str
    number: int


class SimulatedRunner:
    """Running sequences that grow with time; takes the place of the embedded engine's `Runner`. For one thread."""

    def __init__(
        self,
        options: SimulatedOptions,
        weights: SimulatedWeights,
        *,
        vocab_size: int,
        find_stop_string: Callable[[Sequence], str | None],
    ) -> None:
        self.weights: SimulatedWeights | None = weights  # None: released
        self.kept = PrefixCache(0)
        self.running: list[Sequence] = []
        self.count_tokens: Callable[[int], None] = lambda _: None
        self._mix, self._pace, self._fail_share = options.mix, options.pace, options.fail_share
        self._find_stop_string = find_stop_string
        self._random = random.Random(os.getpid())
        self._tokens = [self._random.randrange(vocab_size) for _ in range(_NUM_RANDOM)]
        self._logprob = -math.log(vocab_size)
        self._due = 0.0  # when the work so far should have been done
        self._computed: deque[Prefix] = deque(maxlen=_CACHED_PROMPTS)
        self._ends: dict[int, int] = {}  # completion tokens of each running sequence at its end, by id()
        self._trace = _Trace(Path(options.trace), self._pace.slots) if options.trace else None

    @property
    def has_weights(self) -> bool:
        return self.weights is not None

    def release(self, tags: Collection[str]) -> None:
        if "weights" in tags:
            self.weights = None

    @property
    def num_stored_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in list(self.running))

    def computing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def start(self, admitted: list[Sequence]) -> list[Sequence]:
        """Take the time of the prompts that are not in the cache; every sequence gets one token."""
        prompts = {sequence.prefix() for sequence in admitted}
        new = [prompt for prompt in prompts if prompt not in self._computed]
        self._computed.extend(new)
        started = time.monotonic()
        self.running.extend(admitted)
        for sequence in admitted:
            self._ends[id(sequence)] = self._end_of(sequence)
        self._sleep(self._pace.prompt_s * len(new))
        finished = self._grow(admitted, 1)
        self._note(started, len(admitted))
        return finished

    def step(self) -> list[Sequence]:
        """Decode up to the next end, or as many steps as fit into a stride."""
        started = time.monotonic()
        step_s = self._pace.step_s(len(self.running))
        next_end = min(self._ends[id(one)] - len(one.output_ids) for one in self.running)
        num_steps = max(1, min(next_end, int(_STRIDE_S / step_s)))
        self._sleep(step_s * num_steps)
        grown = len(self.running)
        self.count_tokens(grown * (num_steps - 1))  # the engine thread counts one for each
        finished = self._grow(self.running, num_steps)
        self._note(started, grown * num_steps)
        return finished

    def remove(self, leaving: Collection[Sequence]) -> None:
        gone = set(map(id, leaving))
        self.running = [sequence for sequence in self.running if id(sequence) not in gone]
        for number in gone:
            self._ends.pop(number, None)

    def drop_adapter(self, adapter: Adapter) -> None:
        """Nothing is held for an adapter."""

    def _sleep(self, seconds: float) -> None:
        """Sleep until work that takes so long should be done: what a busy machine oversleeps is made up for."""
        now = time.monotonic()
        if now > self._due + _LATE_S:  # it was idle since
            self._due = now
        self._due += seconds
        time.sleep(max(0.0, self._due - now))

    def _end_of(self, sequence: Sequence) -> int:
        sampling = sequence.sampling
        if not sampling.stop_token_ids and not sampling.stop_strings:
            return sampling.max_new_tokens
        number = sequence.rid.rpartition("-")[2]
        drawn = self._mix.length(repr(sequence.prompt), int(number) if number.isdecimal() else 0)
        return max(1, min(drawn, sampling.max_new_tokens))

    def _grow(self, sequences: list[Sequence], num_steps: int) -> list[Sequence]:
        finished = [sequence for sequence in sequences if self._extend(sequence, num_steps)]
        self.remove(finished)
        return finished

    def _extend(self, sequence: Sequence, num_tokens: int) -> bool:
        sampling, room = sequence.sampling, self._ends[id(sequence)] - len(sequence.output_ids)
        at = self._random.randrange(_NUM_RANDOM - num_tokens)
        tokens = [
            self._other_token(sampling.stop_token_ids) if token in sampling.stop_token_ids else token
            for token in self._tokens[at : at + min(room, num_tokens)]
        ]
        ends_by_itself = room <= num_tokens and self._ends[id(sequence)] < sampling.max_new_tokens
        if ends_by_itself and sampling.stop_token_ids:
            tokens[-1] = sampling.stop_token_ids[0]
        if sampling.stop_strings:
            if (found := self._append_until_stop_string(sequence, tokens)) is not None:
                sequence.finish = FinishReason("stop", matched=found)
                return True
        else:
            sequence.output_ids.extend(tokens)
        sequence.output_logprobs.extend([self._logprob] * (len(sequence.output_ids) - len(sequence.output_logprobs)))
        if room > num_tokens:
            return False
        if self._random.random() < self._fail_share:
            sequence.finish = FinishReason("abort", message="a simulated failure", status_code=500)
        elif ends_by_itself and sampling.stop_token_ids:
            sequence.finish = FinishReason("stop", matched=sampling.stop_token_ids[0])
        else:
            sequence.finish = FinishReason("length")
        return True

    def _append_until_stop_string(self, sequence: Sequence, tokens: list[int]) -> str | None:
        for token in tokens:
            sequence.output_ids.append(token)
            sequence.output_logprobs.append(self._logprob)
            if (found := self._find_stop_string(sequence)) is not None:
                return found
        return None

    def _other_token(self, stops: tuple[int, ...]) -> int:
        return next(token for token in self._tokens if token not in stops)

    def _note(self, started: float, num_tokens: int) -> None:
        if self._trace is not None:
            self._trace.add(started, time.monotonic(), num_tokens)


class _Trace:
    """Cumulative seconds and tokens of the engine, a line every fifth of a second: [clock, busy s, tokens]."""

    def __init__(self, folder: Path, slots: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"engine-{os.getpid()}.jsonl").open("a", buffering=1)
        self._file.write(json.dumps({"slots": slots}) + "\n")
        self._busy_s, self._num_tokens, self._written = 0.0, 0, 0.0

    def add(self, started: float, ended: float, num_tokens: int) -> None:
        self._busy_s += ended - started
        self._num_tokens += num_tokens
        if ended - self._written > _TRACE_S:
            self._written = ended
            self._file.write(json.dumps([ended, self._busy_s, self._num_tokens]) + "\n")


def serve(folder: Path, version: str, port_file: Path, options: SimulatedOptions) -> None:
    config, text = read_model_config(folder), Text(folder)

    def read_weights(source: Path) -> Any:
        time.sleep(options.load_s)
        return _read_weights(source)

    def read_adapter(name: str, path: str) -> Any:
        time.sleep(options.load_s)
        _read_weights(Path(path))
        return SimulatedAdapter(name, path, next(adapter_numbers))

    async def drop_adapter(_: Adapter) -> None:
        """Nothing is held for an adapter."""

    adapter_numbers = itertools.count(1)
    runner: Any = SimulatedRunner(
        options, _read_weights(folder), vocab_size=config.vocab_size, find_stop_string=text.find_stop_string
    )
    limits = Limits(options.slots, max_total_tokens=2**40, max_prefill_tokens=2**40)
    engine = EngineThread(runner, limits, version=version, model_path=str(folder), on_failure=lambda: os._exit(1))

    def count_tokens(num: int) -> None:
        engine.metrics.generated_tokens += num

    runner.count_tokens = count_tokens
    settings = EngineSettings(model_path=folder, port=0, weight_version=version, max_running=options.slots)
    adapters = AdapterRegistry(read_adapter, drop_adapter, max_loaded=settings.max_loaded_loras)
    ends = tuple(dict.fromkeys((*read_eos_token_ids(folder), *text.eos_token_ids())))
    served = ServedModel(config.vocab_size, config.context_tokens, ends, text, adapters.listed)
    state = ServerState(
        engine, JobRunner(engine, adapters), adapters, settings, config, served, text, ImageReader(None), read_weights
    )
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    http = uvicorn.Config(build_app(state), log_level="warning", access_log=False, lifespan="off", ws="none")
    engine.start()
    partial = port_file.with_suffix(".partial")
    partial.write_text(f"{listener.getsockname()[1]}\n")  # connections queue until the server accepts them
    partial.replace(port_file)
    asyncio.run(uvicorn.Server(http).serve(sockets=[listener]))
    engine.stop()


def _read_weights(folder: Path) -> SimulatedWeights:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointRefused(f"{folder} holds no *.safetensors file; nothing was changed")
    try:
        digests = [
            safetensors_digest for file in files for safetensors_digest in safetensors_digests(file.read_bytes())
        ]
    except MalformedWeights as err:
        raise CheckpointRefused(f"{folder}: {err}; nothing was changed") from None
    return SimulatedWeights(weights_digest(digests))


def main() -> None:
    folder, version, port_file, parent, options = sys.argv[1:]
    exit_with_parent(int(parent))
    serve(Path(folder), version, Path(port_file), SimulatedOptions.model_validate_json(options))


def engine_shares(folder: Path, since: float, until: float, full_tokens_per_s: float) -> tuple[float, float]:
    """Return the idle share and the share of the slots used, means over the engines, between two times."""
    idle, used = [], []
    for file in sorted(folder.glob("engine-*.jsonl")):
        lines = [json.loads(line) for line in file.read_text().splitlines()[1:]]
        clocks = [0.0, *(line[0] for line in lines)]
        totals = [(0.0, 0.0), *((line[1], line[2]) for line in lines)]
        (busy_0, tokens_0), (busy_1, tokens_1) = (_at(clocks, totals, moment) for moment in (since, until))
        idle.append(max(0.0, 1.0 - (busy_1 - busy_0) / (until - since)))
        used.append((tokens_1 - tokens_0) / (until - since) / full_tokens_per_s)
    return sum(idle) / len(idle), sum(used) / len(used)


def _at(clocks: Sequence[float], totals: Sequence[tuple[float, float]], moment: float) -> tuple[float, float]:
    """Return the totals at a moment: the engine worked up to each line; between lines far apart it was idle before the later."""
    after = bisect.bisect_left(clocks, moment)
    if after == len(clocks):
        return totals[-1]
    before = max(0, after - 1)
    busy = totals[after][0] - totals[before][0]
    begun = max(clocks[before], clocks[after] - busy)
    share = min(1.0, max(0.0, moment - begun) / max(1e-9, clocks[after] - begun))
    return (totals[before][0] + share * busy, totals[before][1] + share * (totals[after][1] - totals[before][1]))


if __name__ == "__main__":
    main()
