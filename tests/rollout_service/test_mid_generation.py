"""Updates during generation: each token is of the version of its span, recomputed one by one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.rollout_service.embedded_engine.engine_thread import EngineThread, WeightUpdate
from penstock.rollout_service.embedded_engine.scheduler import Limits
from penstock.rollout_service.embedded_engine.sequence import Job, Sampling, Sequence
from tests.contracts.tiny_model import logprobs_by_version, logprobs_over_kept_cache
from tests.examples import examples
from tests.rollout_service.embedded_engine.in_process import Model

PROMPTS = ([5, 17, 88, 250, 31, 9], [44], [5, 17, 88, 250, 31, 9], [7] * 40)
NUM_TOKENS = 24
NUM_VERSIONS = 4
TOLERANCE = 1e-5  # nats; float32 against float32
DEADLINE_S = 300.0


class EngineUnderTest:
    """An engine in this process, and several versions of its weights."""

    def __init__(self, folder: Path) -> None:
        model = Model(folder, NUM_VERSIONS)
        self.weights, self.dense = model.weights, dict(enumerate(model.dense))
        runner = model.runner(max_running=8, max_tokens=4000, max_kept_tokens=0)
        limits = Limits(max_running=8, max_total_tokens=4000, max_prefill_tokens=1000)
        self.engine = EngineThread(runner, limits, version="0", model_path="", on_failure=lambda: None)
        self.engine.start()

    def update(self, version: int, *, flush: bool) -> None:
        self.engine.update(WeightUpdate(self.weights[version], str(version), "", flush))

    def generate(self, sequences: list[Sequence], moments: dict[int, list[int]], mode: str, sampled: int = 0) -> None:
        """Run sequences to their end; at given numbers of tokens, the engine pauses and loads versions in turn."""
        ended = threading.Event()

        def on_step(counts: list[int]) -> None:
            versions = moments.pop(sampled + max(counts), None)
            if versions is None or all(sequence.finish is not None for sequence in sequences):
                return
            self.engine.pause(mode)
            for version in versions[:-1]:
                self.update(version, flush=mode != "in_place")
            last = WeightUpdate(self.weights[versions[-1]], str(versions[-1]), "", mode != "in_place")
            self.engine.update(last).add_done_callback(lambda _: self.engine.resume())

        self.engine.submit(Job(sequences, lambda _: ended.set(), on_step))
        assert ended.wait(DEADLINE_S)


@pytest.fixture(scope="module")
def under_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineUnderTest]:
    created = EngineUnderTest(tmp_path_factory.mktemp("engine"))
    yield created
    created.engine.stop()


def runs_of(sequence: Sequence) -> list[tuple[int, int, int]]:
    return [(int(span.version), span.start, span.end) for span in sequence.spans]


def expected_runs(moments: dict[int, list[int]]) -> list[tuple[int, int, int]]:
    """The spans to expect; versions that sampled no token have none."""
    cuts = [(0, 0), *((at, versions[-1]) for at, versions in sorted(moments.items()))]
    ends = [at for at, _ in cuts[1:]] + [NUM_TOKENS]
    runs: list[tuple[int, int, int]] = []
    for (start, version), end in zip(cuts, ends, strict=True):
        if runs and runs[-1][0] == version:
            runs[-1] = (version, runs[-1][1], end)
        else:
            runs.append((version, start, end))
    return runs


MOMENTS = st.dictionaries(
    st.integers(1, NUM_TOKENS - 1), st.lists(st.integers(0, NUM_VERSIONS - 1), min_size=1, max_size=2), max_size=5
)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
@examples(10)
@given(moments=MOMENTS, seed=st.integers(0, 2**32))
def test_every_token_is_of_the_version_of_its_span(
    under_test: EngineUnderTest, mode: str, moments: dict[int, list[int]], seed: int
) -> None:
    """For any number and time of weight changes, spans are exact and logprobs are those of the span's weights.

    After ``retract`` the context of a token was computed by its own version. After ``in_place`` each version left its
    own keys and values in the cache; a forward pass over a cache that is mixed in the same way gives the same number.
    """
    sampling = [Sampling(NUM_TOKENS, seed=seed + index) for index in range(len(PROMPTS))]
    sequences = [Sequence(f"{i:032}", tuple(prompt), sampling[i]) for i, prompt in enumerate(PROMPTS)]
    under_test.update(0, flush=True)
    under_test.generate(sequences, dict(moments), mode)
    recompute = logprobs_by_version if mode == "retract" else logprobs_over_kept_cache
    for sequence, prompt in zip(sequences, PROMPTS, strict=True):
        assert runs_of(sequence) == expected_runs(moments)
        expected = recompute(under_test.dense, prompt, sequence.output_ids, runs_of(sequence))
        assert sequence.output_logprobs == pytest.approx(expected, abs=TOLERANCE)
        assert sequence.num_retractions == (len(moments) if mode == "retract" else 0)
