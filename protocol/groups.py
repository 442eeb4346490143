"""Tasks and groups as facts carry them: frozen models, the types of their fields, and the seeds of sampling."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

MAX_SEED = 2**63 - 1  # what engines take
MAX_TEACHER_TOP_K = 256  # likeliest tokens that a teacher names for each sampled one
Split = Literal["train", "eval"]
FinishReason = Literal["stop", "length", "abort"]
AbandonReason = Literal["aborted", "surplus"]
Identifier = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9_.:#-]+$")]
RewardName = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9_.:#/-]+$")]  # rewards/my.py:f
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, le=2**53)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Clock = Annotated[float, Field(ge=-1e11, le=1e11, allow_inf_nan=False)]  # seconds since 1970, by the writer's clock
Duration = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]  # seconds
TopK = Annotated[int, Field(ge=0, le=MAX_TEACHER_TOP_K)]
StopString = Annotated[str, Field(min_length=1, max_length=200)]
StopStrings = Annotated[tuple[StopString, ...], Field(max_length=16)]
MAX_EXPERTS = 2**15  # of a layer; their numbers are stored in 8 or 16 bits
MAX_IMAGES = 8  # of a row
MAX_IMAGE_BYTES = 16 * 1024**2
MAX_IMAGE_SIDE = 2**15  # patches of a grid in one direction
MAX_COMPLETIONS = 4096  # of a group, and of those that are started for it
SINGLE_TURN = "single_turn"  # the environment whose trajectories are a prompt and one completion


def derived_seed(seed: int, *what: str | int) -> int:
    """Return the seed of something named by ``what``, 63 bits: another one for each name, the same in every process."""
    text = "\0".join(map(str, (seed, *what)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1


class Wire(BaseModel):
    """Base of all models sent between processes: frozen, strict, unknown fields refused."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


# A field that earlier releases do not know is written only if it is set.
UNLESS_EMPTY = Field(exclude_if=lambda value: not value)
UNLESS_NONE = Field(exclude_if=lambda value: value is None)


def first_problem(err: ValidationError, whole: str = "body", *, most: int | None = None) -> str:
    """Return the first field that a model refused, and why, each cut off; ``whole`` names the value itself."""
    first = err.errors(include_input=False, include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))[:most] or whole}: {first['msg'][:most]}"


class BlobRef(Wire):
    """Reference to one immutable object in S3, with size and sha256 to verify it by."""

    key: Annotated[str, Field(min_length=1, max_length=512)]
    size_bytes: Count
    sha256: Sha256


class RouterShape(Wire):
    """How many experts the routers of a model choose for each token."""

    num_layers: Annotated[int, Field(ge=1, le=10_000)]  # with experts
    num_experts: Annotated[int, Field(ge=1, le=MAX_EXPERTS)]  # of a layer
    top_k: Annotated[int, Field(ge=1, le=MAX_EXPERTS)]  # chosen for a token, all different

    @property
    def bytes_per_token(self) -> int:
        return self.num_layers * self.top_k * (1 if self.num_experts <= 256 else 2)

    def __str__(self) -> str:
        return f"{self.top_k} of {self.num_experts} experts in {self.num_layers} layers"

    @model_validator(mode="after")
    def _possible(self) -> RouterShape:
        if self.top_k > self.num_experts:
            raise ValueError(f"{self}: a token has at most {self.num_experts} different ones")
        return self


class ImageRef(Wire):
    """One image of a row: the object with its bytes, and the tokens that stand for it."""

    position: Count  # of its first token in the row
    num_tokens: Annotated[int, Field(ge=1, le=2**24)]  # all with the id of the model's image token
    grid_thw: tuple[
        Annotated[int, Field(ge=1, le=1)],
        Annotated[int, Field(ge=1, le=MAX_IMAGE_SIDE)],
        Annotated[int, Field(ge=1, le=MAX_IMAGE_SIDE)],
    ]  # patches: temporal, of the height, of the width
    sha256: Sha256
    size_bytes: Annotated[int, Field(ge=1, le=MAX_IMAGE_BYTES)]

    @property
    def end(self) -> int:
        return self.position + self.num_tokens

    @property
    def num_patches(self) -> int:
        """Patches of its grid; a token stands for the same number of them in every image of a model."""
        return self.grid_thw[0] * self.grid_thw[1] * self.grid_thw[2]

    @model_validator(mode="after")
    def _whole_tokens(self) -> ImageRef:
        if self.num_patches % self.num_tokens:
            raise ValueError(f"image {self.sha256}: {self.num_tokens} tokens for a grid of {self.grid_thw} patches")
        return self


class RowImages(Wire):
    """The images of a row in the order of its tokens; see `protocol/images`."""

    processor: Sha256  # of what makes pixel values of the bytes: `ImageProcessor.sha256`
    refs: Annotated[tuple[ImageRef, ...], Field(min_length=1, max_length=MAX_IMAGES)]

    @property
    def num_tokens(self) -> int:
        return sum(ref.num_tokens for ref in self.refs)

    def before(self, end: int) -> RowImages | None:
        """Return those whose tokens are among the first ``end`` of the row; None: there are none."""
        refs = tuple([ref for ref in self.refs if ref.end <= end])
        return RowImages(processor=self.processor, refs=refs) if refs else None

    @model_validator(mode="after")
    def _in_order(self) -> RowImages:
        for previous, other in zip(self.refs, self.refs[1:], strict=False):
            if previous.end > other.position:
                raise ValueError(
                    f"image {other.sha256} begins at token {other.position}, {previous.sha256} ends at {previous.end}"
                )
        return self


class Sampling(Wire):
    """How the engine samples. ``temperature`` 0 is greedy; ``top_p`` and ``top_k`` at 1 and -1 are off.

    A completion also ends with the first token that completes one of ``stop`` in its text. The tokens of the stop
    string are part of the completion, and so is its text: nothing is cut away or tokenised again.
    """

    max_new_tokens: Annotated[int, Field(ge=1, le=1_000_000)]
    temperature: Annotated[float, Field(ge=0.0, le=100.0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    stop_token_ids: tuple[int, ...] = ()
    stop: StopStrings = ()
    # Of the experts' choices that the engine returns for each token; None: it returns none.
    routers: Annotated[RouterShape | None, UNLESS_EMPTY] = None


class RewardRequest(Wire):
    """What the reward service needs to score a group: the reward's name and the row it belongs to.

    ``ground_truth`` and ``extra_info`` are JSON texts, so that any value of a data set is preserved.
    """

    name: RewardName
    data_source: str = ""
    ground_truth: str | None = None
    extra_info: str = "{}"

    @model_validator(mode="after")
    def _json_texts(self) -> RewardRequest:
        for field in ("ground_truth", "extra_info"):
            text = getattr(self, field)
            if text is not None:
                try:
                    json.loads(text)
                except (ValueError, RecursionError) as err:
                    raise ValueError(f"{field} is not JSON: {err}") from None
        return self


class Task(Wire):
    """Generate one group: ``group_size`` completions of one prompt.

    With a baseline the group has one more completion, the last, sampled greedily: scored and never trained on.
    """

    group_id: Identifier
    prompt_ids: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**31)], ...], Field(min_length=1)]
    prompt_text: str
    group_size: Annotated[int, Field(ge=1, le=MAX_COMPLETIONS)]
    sampling: Sampling
    reward: RewardRequest
    split: Split
    environment: Identifier = SINGLE_TURN
    attempt: Count = 0
    issued_version: Count
    pinned_version: Count | None = None  # evaluation: every token must come from this version
    with_baseline: bool = False  # ReMax: the greedy completion's reward is the baseline of the others
    # Started in addition to ``group_size``, which are enough.
    redundant_completions: Annotated[int, Field(ge=0, lt=MAX_COMPLETIONS), UNLESS_EMPTY] = 0
    # How long the group waits for them, see `Redundancy`.
    redundant_wait: Annotated[float, Field(ge=0.0, le=1000.0, allow_inf_nan=False), UNLESS_EMPTY] = 0.0
    min_episodes: Count | None = None  # fewest episodes of a group, where others failed in every attempt; None: all
    # the row's chat as JSON, for environments that render it themselves; "": single_turn
    messages: Annotated[str, UNLESS_EMPTY] = ""
    # likeliest tokens that the teacher is to name, 0: none but those sampled; None: no teacher
    teacher_top_k: Annotated[TopK | None, UNLESS_NONE] = None
    # of its samples and episodes; None: random
    seed: Annotated[Annotated[int, Field(ge=0, le=MAX_SEED)] | None, UNLESS_NONE] = None
    images: Annotated[RowImages | None, UNLESS_NONE] = None  # of the prompt; ``prompt_ids`` hold all of their tokens

    @model_validator(mode="after")
    def _images_in_prompt(self) -> Task:
        for ref in self.images.refs if self.images is not None else ():
            if ref.end > len(self.prompt_ids) or len(set(self.prompt_ids[ref.position : ref.end])) != 1:
                raise ValueError(
                    f"image {ref.sha256}: prompt tokens {ref.position} to {ref.end} are not one token, repeated"
                )
        return self


class AbandonedCompletion(Wire):
    """A completion that was started and is not part of its group, because enough others had ended before it.

    ``aborted``: the engine ended it on request; ``surplus``: it ended by itself when or just before that was requested.
    """

    reason: AbandonReason
    num_tokens: Annotated[int, Field(ge=0, le=1_000_000)]  # sampled until then


class GeneratedGroup(Wire):
    """One group of a pack, as generated; ``row_group`` is its row group in the Parquet object.

    Lengths and finish reasons are one for each trajectory: of an episode, those of all its rows together. The object
    does not hold completions that were ``abandoned``.
    """

    group_id: Identifier
    row_group: Count
    split: Split
    attempt: Count
    reward_name: RewardName
    issued_version: Count
    oldest_version: Count
    newest_version: Count
    prompt_tokens: Count
    completion_tokens: tuple[Count, ...]
    finish_reasons: tuple[FinishReason, ...]
    has_baseline: bool = False  # the last trajectory is the greedy one that is not trained on
    rows: tuple[Count, ...] = ()  # of each episode; none: every trajectory is one row, and no episode is described
    row_tokens: Count | None = None  # of all rows of episodes together, context and shared beginnings included
    # a teacher's log-probabilities are in the pack, with so many likeliest tokens each
    teacher_top_k: Annotated[TopK | None, UNLESS_NONE] = None
    abandoned: Annotated[tuple[AbandonedCompletion, ...], Field(max_length=MAX_COMPLETIONS), UNLESS_EMPTY] = ()
    # the experts that the engine's routers chose for each token are in the pack
    routers: Annotated[RouterShape | None, UNLESS_EMPTY] = None
    # `RowImages.processor` of its rows; None: no row has an image
    image_processor: Annotated[Sha256 | None, UNLESS_EMPTY] = None

    @property
    def num_rows(self) -> int:
        return sum(self.rows) if self.rows else len(self.completion_tokens)

    @property
    def num_trained(self) -> int:
        """Trajectories that the trainer may train on: all but the baseline, which is the last."""
        return len(self.completion_tokens) - self.has_baseline

    @model_validator(mode="after")
    def _consistent(self) -> GeneratedGroup:
        if self.num_trained < 1:
            raise ValueError(f"group {self.group_id} has no trajectory" + " but a baseline" * self.has_baseline)
        if len(self.completion_tokens) != len(self.finish_reasons):
            raise ValueError(
                f"group {self.group_id}: {len(self.completion_tokens)} lengths but "
                f"{len(self.finish_reasons)} finish reasons"
            )
        if (self.row_tokens is None) != (not self.rows) or (
            self.rows and (len(self.rows) != len(self.completion_tokens) or min(self.rows) < 1)
        ):
            raise ValueError(
                f"group {self.group_id}: {self.rows[:8]} rows of {self.row_tokens} tokens for "
                f"{len(self.completion_tokens)} episodes; expected one or more rows for each"
            )
        if self.rows and self.abandoned:
            raise ValueError(
                f"group {self.group_id}: {len(self.abandoned)} abandoned completions in a group of episodes"
            )
        if self.newest_version < self.oldest_version:
            raise ValueError(f"group {self.group_id}: newest version is older than the oldest")
        return self


class ScoredGroup(Wire):
    """One group with a reward for every trajectory; ``parts`` are named components, same length."""

    generated: GeneratedGroup
    rewards: tuple[Finite, ...]
    parts: dict[str, tuple[Finite, ...]] = {}
    scorer: str  # endpoint or built-in that gave the rewards, with its version

    @model_validator(mode="after")
    def _one_reward_each(self) -> ScoredGroup:
        expected = len(self.generated.completion_tokens)
        for name, values in {"rewards": self.rewards, **self.parts}.items():
            if len(values) != expected:
                raise ValueError(
                    f"group {self.generated.group_id}: {len(values)} values in {name} of {expected} trajectories"
                )
        return self
