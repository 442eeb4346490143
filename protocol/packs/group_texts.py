"""What a reward reads of a pack: prompts, completions and reward requests, without the columns of tokens; pure."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from penstock.protocol.errors import PackError
from penstock.protocol.groups import GeneratedGroup, RewardRequest
from penstock.protocol.packs import episode_columns
from penstock.protocol.packs.pack_rows import Rows
from penstock.protocol.trajectory import check_equal

TEXT_COLUMNS = (
    "group_id", "num_prompt_tokens", "prompt_text", "completion_text", "finish_reason", "reward_name", "data_source",
    "ground_truth",
    "extra_info", *episode_columns.TEXT_COLUMNS,
)  # fmt: skip


def rewards_of(rows: Rows) -> list[RewardRequest]:
    values = rows.each_group("reward_name", "data_source", "ground_truth", "extra_info")
    return [RewardRequest(name=of_group.pop("reward_name"), **of_group) for of_group in values]


@dataclass(frozen=True, slots=True)
class EpisodeTexts:
    num_rows: int
    end_status: str
    reward: float | None  # the environment's; None: it gives none
    reward_parts: tuple[tuple[str, float], ...]
    messages: str  # JSON list


@dataclass(frozen=True, slots=True)
class GroupTexts:
    group_id: str
    prompt_text: str
    completions: tuple[str, ...]
    finish_reasons: tuple[str, ...]
    reward: RewardRequest
    num_prompt_tokens: int = 0
    completion_tokens: tuple[int, ...] = ()  # from the message that announced the pack; () where it is unknown
    given: tuple[EpisodeTexts, ...] = ()  # of each episode, what its environment says of it; (): no episodes

    def check_described_by(self, described: GeneratedGroup) -> None:
        check_equal(
            described.group_id,
            ("group_id", self.group_id, described.group_id),
            ("reward_name", self.reward.name, described.reward_name),
            ("prompt_tokens", self.num_prompt_tokens, described.prompt_tokens),
            ("completions", len(self.completions), len(described.completion_tokens)),
            ("finish_reasons", self.finish_reasons, described.finish_reasons),
            ("rows", tuple([episode.num_rows for episode in self.given]), described.rows),
        )


def texts_of(rows: Rows) -> list[GroupTexts]:
    completions, reasons = rows.values("completion_text"), rows.values("finish_reason")
    columns = zip(
        _episode_texts(rows),
        rows.each_group("group_id", "prompt_text", "num_prompt_tokens"),
        rewards_of(rows),
        itertools.pairwise(rows.starts),
        strict=True,
    )
    return [
        GroupTexts(
            completions=tuple([completions[span.start] for span, _ in group_episodes] or completions[start:end]),
            finish_reasons=tuple(
                ["stop" if episode.end_status == "done" else "length" for _, episode in group_episodes]
                or reasons[start:end]
            ),
            reward=reward,
            given=tuple([episode for _, episode in group_episodes]),
            **of_group,
        )
        for group_episodes, of_group, reward, (start, end) in columns
    ]


def _episode_texts(rows: Rows) -> list[list[tuple[episode_columns.EpisodeSpan, EpisodeTexts]]]:
    spans = episode_columns.spans(rows)
    names = ("end_status", "episode_reward", "reward_parts", "messages") if any(spans) else ()
    columns = [rows.values(name) for name in names]
    groups = []
    for group_spans in spans:
        texts = []
        for span in group_spans:
            status, reward, parts, messages = (values[span.start] for values in columns)
            episode = EpisodeTexts(
                span.end - span.start, status, reward, episode_columns.named_numbers(parts), messages
            )
            if not all(map(math.isfinite, (reward or 0.0, *(value for _, value in episode.reward_parts)))):
                raise PackError(
                    f"an episode's reward is {reward} of {dict(episode.reward_parts)}, expected finite ones"
                )
            texts.append((span, episode))
        groups.append(texts)
    return groups
