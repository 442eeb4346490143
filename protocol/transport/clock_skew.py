"""Detect a clock difference that makes an S3 server refuse signed requests (more than 15 minutes); pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

LIMIT = timedelta(minutes=15)  # of Signature Version 4


def clock_skew(headers: Mapping[str, str], now: datetime) -> str:
    """Return the difference of the clocks and both times, in words, when it is too large; else an empty text.

    Args:
        headers: Of the server's answer; ``Date`` is the server's time.
        now: This machine's time, with a time zone.
    """
    try:
        theirs = parsedate_to_datetime(headers["Date"])
    except (KeyError, ValueError):
        return ""
    theirs = theirs if theirs.tzinfo else theirs.replace(tzinfo=UTC)
    apart = abs(now - theirs)
    if apart <= LIMIT:
        return ""
    here, there = (f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC" for time in (now, theirs))
    return (
        f"it is {here} here and {there} at the server, {apart.total_seconds() / 60:.0f} minutes apart, and S3 takes at most "
        f"{LIMIT.total_seconds() / 60:.0f}: correct the clock that is wrong"
    )
