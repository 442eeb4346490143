"""Read the header ``Retry-After`` in both forms (RFC 9110, section 10.2.3); pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

_LONGEST_S = 3600.0
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


def retry_after_s(headers: Mapping[str, str], now: datetime | None = None) -> float:
    """Return the seconds to wait, at most an hour; 0.0 without the header, for a time in the past and for anything else.

    Args:
        headers: Of an answer, by any case of their names or by lower-case names.
        now: The time to which a date is compared, with a time zone; None: the present time.
    """
    text = (headers.get("retry-after") or headers.get("Retry-After") or "").strip()
    if _SECONDS.fullmatch(text):
        return min(float(text), _LONGEST_S)
    try:
        at = parsedate_to_datetime(text)
    except ValueError:
        return 0.0
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return min(max((at - (now or datetime.now(UTC))).total_seconds(), 0.0), _LONGEST_S)
