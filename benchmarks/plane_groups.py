"""Groups as large as real ones: what the plane benchmark and its peers carry. Needs only pyarrow and numpy."""

from __future__ import annotations

import numpy as np

from protocol.facts import RewardRequest
from protocol.trajectory import Group, Trajectory
from protocol.versions import PolicyVersion, VersionRun

#: name: (trajectories, tokens of each, of these prompt tokens, characters of a completion)
SIZES = {"long": (8, 4096, 512, 14_000), "tiny": (8, 24, 15, 9)}
_VOCABULARY = 150_000


def make_template(size: str, seed: int) -> Group:
    """One group: token ids as skewed as language, log-probabilities as an engine reports them."""
    num, length, prompt, characters = SIZES[size]
    random = np.random.default_rng(seed)
    mask = np.arange(length) >= prompt
    rows = tuple(
        Trajectory(
            token_ids=(random.zipf(1.3, length) % _VOCABULARY).astype(np.int32),
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
