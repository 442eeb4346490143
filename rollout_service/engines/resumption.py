"""A sequence that a weight update interrupted and that is continued afterwards: its parts, and their join; pure.

The same worker requests the rest: the prefix has to be recomputed under the new weights on any engine, and an engine
that has just loaded them is idle. So an interrupted sequence is never stored or handed over; when its worker is killed,
the whole pack is redelivered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.protocol.seeds import derived_seed
from penstock.protocol.versions import VersionRun
from penstock.rollout_service.engines.completion import Completion


@dataclass(slots=True)
class Resumption:
    """One sequence and the parts of its completion, in order."""

    prompt: Sequence[int]
    max_new_tokens: int
    seed: int | None = None  # of all samples of its prompt; None: random
    number: int = 0  # among these
    parts: list[Completion] = field(default_factory=list)

    @property
    def sampled(self) -> list[int]:
        """The completion's tokens so far."""
        return [token for part in self.parts for token in part.token_ids]

    @property
    def num_left(self) -> int:
        """The number of tokens that may still be sampled."""
        return self.max_new_tokens - sum(len(part.token_ids) for part in self.parts)

    @property
    def next_seed(self) -> int | None:
        """The seed of its next part: the first part's is that of the prompt, from which an engine derives those of n samples."""
        if self.seed is None or not self.parts:
            return self.seed
        return derived_seed(self.seed, self.number, self.max_new_tokens - self.num_left)

    @property
    def is_cut(self) -> bool:
        """Whether an update interrupted it, and nothing else ended it."""
        return self.parts[-1].finish_reason == "abort" and self.num_left > 0

    @property
    def visible(self) -> list[int]:
        """The tokens that its text is decoded from: without the stop token, as engines do."""
        return self.sampled[:-1] if self.parts[-1].finish_reason == "stop" else self.sampled

    def joined(self, text: str) -> Completion:
        """Return the parts as one completion of this text.

        Versions and log-probabilities are those that each token was sampled with. A sequence that was interrupted at its
        last allowed token ended by length.
        """
        finish = self.parts[-1].finish_reason
        return Completion(
            token_ids=self.sampled,
            logprobs=[logprob for part in self.parts for logprob in part.logprobs],
            version_runs=_joined_runs(self.parts),
            finish_reason="length" if finish == "abort" else finish,
            text=text,
            experts=self.parts[-1].experts,  # which computed all tokens before it again
        )


def _joined_runs(parts: Sequence[Completion]) -> tuple[VersionRun, ...]:
    runs: list[VersionRun] = []
    start = 0
    for part in parts:
        for run in part.version_runs:
            moved = VersionRun(run.version, run.start + start, run.end + start)
            if runs and runs[-1].version == moved.version:
                runs[-1] = runs[-1]._replace(end=moved.end)
            else:
                runs.append(moved)
        start += len(part.token_ids)
    return tuple(runs)
