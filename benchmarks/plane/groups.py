"""Groups of realistic size for the plane benchmark and its peers. Needs only pyarrow and numpy."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, replace

import numpy as np

from penstock.protocol.facts import RewardRequest
from penstock.protocol.packs import group_pack
from penstock.protocol.trajectory import Group, Trajectory
from penstock.protocol.versions import PolicyVersion, VersionRun

#: name: (trajectories, tokens of each, of these prompt tokens, characters of a completion)
SIZES = {"long": (8, 4096, 512, 14_000), "tiny": (8, 24, 15, 9)}
GROUPS_PER_STEP = 48
NUM_TEMPLATES = 8
VOCABULARY = 150_000
_CODEC_REPEATS = 60


@dataclass(frozen=True, slots=True)
class Case:
    """Groups of a size, with a number of them per message, through the scorer or (``hop`` off) directly."""

    size: str  # one of SIZES
    groups_per_pack: int
    hop: bool = True

    @property
    def name(self) -> str:
        """The name of the case in a table."""
        num, length, *_ = SIZES[self.size]
        way = "scored" if self.hop else "direct"
        return f"{num} x {length}, {self.groups_per_pack} a message, {way}"

    def num_groups(self, seconds: float) -> int:
        """Return whole steps and whole packs of groups, for about ``seconds`` seconds."""
        per_second = 150 if self.size == "long" else 1000
        return GROUPS_PER_STEP * max(2, round(seconds * per_second / GROUPS_PER_STEP))


CASES = (
    Case("long", 1),
    Case("long", 4),
    Case("long", 1, hop=False),
    Case("long", 4, hop=False),
    Case("tiny", 12),
)


def make_template(size: str, seed: int) -> Group:
    """Return one group: token ids with a distribution like that of language, log-probabilities as an engine reports them."""
    num, length, prompt, characters = SIZES[size]
    random = np.random.default_rng(seed)
    mask = np.arange(length) >= prompt
    shared = random.zipf(1.3, prompt)
    rows = tuple(
        Trajectory(
            token_ids=(np.concatenate([shared, random.zipf(1.3, length - prompt)]) % VOCABULARY).astype(np.int32),
            loss_mask=mask,
            behaviour_logprobs=np.where(mask, -random.exponential(0.4, length), 0.0).astype(np.float32),
            version_runs=(VersionRun(PolicyVersion(0), prompt, length),),
            finish_reason="stop",
            completion_text=_text(random, characters),
        )
        for _ in range(num)
    )
    return Group(
        group_id=f"e0.p{seed}.a0",
        split="train",
        attempt=0,
        issued_version=0,
        prompt_text=_text(random, 4 * prompt),
        num_prompt_tokens=prompt,
        reward=RewardRequest(name="exact_match", data_source="bench", ground_truth='"42"', extra_info="{}"),
        trajectories=rows,
    )


def _text(random: np.random.Generator, characters: int) -> str:
    words = ["the", "sum", "of", "x", "and", "y", "is", "therefore", "12", "=", "prime", "we", "get", "so", "that"]
    text = " ".join(random.choice(words, size=characters // 3 + 1))
    return text[:characters]


def codec_ms(case: Case) -> float:
    """Return the CPU milliseconds of one group's codec, alone: Parquet written, read, and its texts where it is scored."""
    groups = [replace(make_template(case.size, n), group_id=f"e0.p{n}.a0") for n in range(case.groups_per_pack)]
    group_pack.decode(group_pack.encode(groups))
    gc.freeze()  # as in the services
    started = time.process_time()
    for _ in range(_CODEC_REPEATS):
        data = group_pack.encode(groups)
        if case.hop:
            group_pack.decode_texts(data, range(len(groups)))
        group_pack.decode(data)
    return 1000 * (time.process_time() - started) / (_CODEC_REPEATS * len(groups))
