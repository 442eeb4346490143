"""Whether a refusal may be the fault of a clock: an S3 server takes no request that was signed 15 minutes off its own time; pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

LIMIT = timedelta(minutes=15)  # of Signature Version 4


def clocks_apart(headers: Mapping[str, str], now: datetime) -> str:
    """Say how far the clocks are apart, with both times, when that is too far; empty when it is not, or nobody knows.

    Args:
        headers: Of the server's answer; its ``Date`` is the server's time.
        now: This machine's time, with its time zone.
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
        f"{LIMIT.total_seconds() / 60:.0f}: set the clock that is wrong"
    )
