"""The header Retry-After in both of its forms, and the pauses before a request is sent again."""

from __future__ import annotations

import random
from datetime import UTC, datetime

import pytest

from penstock.serving.http_connections import Answer, ConnectionFailed, Retries, retry_after_s

_NOW = datetime(2026, 11, 28, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3", 3.0),
        (" 0.25 ", 0.25),
        ("86400", 3600.0),
        ("Sat, 28 Nov 2026 12:00:30 GMT", 30.0),
        ("Sat, 28 Nov 2026 11:59:59 GMT", 0.0),
        ("Sun, 29 Nov 2026 12:00:00 GMT", 3600.0),
        ("", 0.0),
        ("-1", 0.0),
        ("nan", 0.0),
        ("1e9", 0.0),
        ("soon", 0.0),
        ("٣", 0.0),
        ("9" * 400, 0.0),
    ],
)
def test_seconds_and_dates_are_read(text: str, expected: float) -> None:
    """A server's own word is at most an hour; what is neither form is no wait."""
    assert retry_after_s({"retry-after": text}, _NOW) == expected
    assert retry_after_s({"Retry-After": text}, _NOW) == expected


def test_no_header_is_no_wait() -> None:
    assert retry_after_s({}) == 0.0


@pytest.mark.parametrize("share", [0.0, 1.0])
async def test_a_pause_is_random_after_what_the_server_asks_for(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never before Retry-After, and not all at that moment: who was refused together does not come together again."""
    monkeypatch.setattr(random, "uniform", lambda low, high: low + share * (high - low))
    busy = Answer(503, {"retry-after": "0.01"}, b"")
    tries = [ConnectionFailed("http://x", "reset"), busy, busy, busy, Answer(200, {}, b"")]
    pauses: list[float] = []

    async def send() -> Answer:
        answer = tries.pop(0)
        if isinstance(answer, ConnectionFailed):
            raise answer
        return answer

    answer = await Retries(0.01, 0.03, most=4).send(send, lambda _, pause_s: pauses.append(pause_s))
    assert answer.status == 200
    assert pauses == pytest.approx([share * 0.01, 0.01 + share * 0.02, 0.01 + share * 0.03, 0.01 + share * 0.03])
