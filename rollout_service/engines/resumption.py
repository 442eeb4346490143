"""A sequence that was cut short by an update and sampled on afterwards: its parts, and what they are together; pure.

It is asked for again by the same worker, of whichever of its engines is asked: the prefix has to be computed anew
under the new weights wherever that happens, and an engine that has just swapped is free at once. So a cut sequence
is never anything that must be stored or handed over; a worker that dies with it leaves the pack to come again whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.protocol.versions import VersionRun
from penstock.rollout_service.engines.completion import Completion


@dataclass(slots=True)
class Resumption:
    """One sequence and the parts of its completion, in order."""

    prompt: Sequence[int]
    max_new_tokens: int
    parts: list[Completion] = field(default_factory=list)

    @property
    def sampled(self) -> list[int]:
        """The completion's tokens so far."""
        return [token for part in self.parts for token in part.token_ids]

    @property
    def room(self) -> int:
        """How many tokens may still be sampled."""
        return self.max_new_tokens - sum(len(part.token_ids) for part in self.parts)

    @property
    def is_cut(self) -> bool:
        """Whether it was ended by an update and by nothing else."""
        return self.parts[-1].finish_reason == "abort" and self.room > 0

    @property
    def visible(self) -> list[int]:
        """The tokens that its text is made of: without the stop token, as an engine decodes them."""
        return self.sampled[:-1] if self.parts[-1].finish_reason == "stop" else self.sampled

    def joined(self, text: str) -> Completion:
        """Return the parts as one completion of this text.

        Versions and log-probabilities are those each token was sampled with. A part that was cut at its very last
        allowed token ended by length.
        """
        finish = self.parts[-1].finish_reason
        return Completion(
            token_ids=self.sampled,
            logprobs=[logprob for part in self.parts for logprob in part.logprobs],
            version_runs=_joined_runs(self.parts),
            finish_reason="length" if finish == "abort" else finish,
            text=text,
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
