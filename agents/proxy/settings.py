"""The limits of an episode, and how its history is treated."""

from __future__ import annotations

from pydantic import Field

from penstock.agents.proxy.tree import HistoryMatch
from penstock.protocol.config.connection import Section


class EpisodeLimits(Section):
    history_match: HistoryMatch = Field(
        "echo",
        description="When a client's copy of an answer is that answer: strict (equal texts), json (arguments equal as JSON), "
        "echo (outer white space may differ, and the reasoning may be left out).",
    )
    max_turns: int = Field(1000, ge=1, description="Answers of one episode.")
    max_running: int = Field(64, ge=1, description="Requests of one episode that are sampled at once.")
    max_messages: int = Field(4096, ge=1, description="Messages of one request.")
    max_body_bytes: int = Field(16 * 1024**2, ge=1, description="Bytes of one request.")
    max_stored_tokens: int = Field(
        4_000_000, ge=1, description="Tokens that are recorded of one episode, at 8 to 12 bytes each."
    )
    max_staleness: int | None = Field(
        None,
        ge=0,
        description="Versions between the oldest sampled token of an episode and the newest; beyond it requests are refused as expired, "
        "before a reward is paid for. None: no limit.",
    )
    answer_deadline_s: float = Field(900.0, gt=0, description="Seconds for one answer.")
    body_deadline_s: float = Field(60.0, gt=0, description="Seconds for a client to send a request.")
    stream_wait_s: float = Field(
        60.0,
        ge=0,
        description="Seconds before the status 200 of a stream is sent; an error until then has its own status.",
    )
    stream_comment_s: float = Field(3.0, gt=0, description="Seconds between the comments that keep a stream open.")
    retry_grace_s: float = Field(
        5.0,
        ge=0,
        description="Seconds that a call goes on after its client has disconnected, in which a retry may join it.",
    )
    kept_answers: int = Field(64, ge=1, description="Finished answers that a retry may ask for again.")
    kept_answers_s: float = Field(600.0, ge=0, description="Seconds for which it may.")
