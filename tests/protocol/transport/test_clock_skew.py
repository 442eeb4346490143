"""A refusal caused by a wrong clock is not reported as a wrong key."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime

import pytest
from tests.servers import require_package

from penstock.protocol.config.connection import S3Settings
from penstock.protocol.transport.s3_answers import clock_skew

NOW = datetime(2026, 5, 4, 12, 0, 0, tzinfo=UTC)
TRY = """
import sys, structlog
from penstock.protocol.config.connection import S3Settings
from penstock.protocol.errors import PenstockError
from penstock.protocol.transport.blobs import Blobs
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
blobs = Blobs(S3Settings.model_validate_json(sys.argv[1]), deadline_s=0.2)
for call in (lambda: blobs.check("x", deadline_s=0.2), lambda: blobs.put("runs/x/y", b"abc"), lambda: blobs.exists("runs/x/y")):
    try:
        call()
    except PenstockError as err:
        print(type(err).__name__, err)
"""


@pytest.mark.parametrize("step", ["+40m", "-40m"])
def test_a_clock_that_is_wrong_is_named_with_both_times(s3_settings: S3Settings, step: str) -> None:
    """A real server refuses every request of a client 40 minutes off; the errors name the clock and not the key."""
    require_package("faketime", "faketime")
    command = ["faketime", "-f", step, sys.executable, "-c", TRY, s3_settings.model_dump_json()]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    lines = ran.stdout.splitlines()
    assert len(lines) == 3, ran.stdout + ran.stderr
    for line in lines:
        assert line.startswith("BlobStoreUnreachable"), line
        assert "UTC here and" in line
        assert "40 minutes apart, and S3 takes at most 15: correct the clock that is wrong" in line
        assert "s3.secret_key" not in line


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({}, ""),
        ({"Date": "yesterday"}, ""),
        ({"Date": "Mon, 04 May 2026 12:14:00 GMT"}, ""),
        ({"Date": "Mon, 04 May 2026 11:40:00 GMT"}, "12:00:00 UTC here and 2026-05-04 11:40:00 UTC at the server, 20 min"),
        ({"Date": "Mon, 04 May 2026 14:20:00 +0200"}, "and 2026-05-04 12:20:00 UTC at the server, 20 minutes"),
    ],
)  # fmt: skip
def test_a_clock_skew_is_reported_only_if_the_server_gives_its_time(headers: dict[str, str], says: str) -> None:
    """No date, an invalid date, or at most fifteen minutes of difference: the error does not mention clocks."""
    text = clock_skew(headers, NOW)
    assert says in text
    assert bool(text) == bool(says)
