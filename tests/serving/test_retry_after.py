"""The header Retry-After in both of its forms."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from penstock.serving.http_connections import retry_after_s

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
