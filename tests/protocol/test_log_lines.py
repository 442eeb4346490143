"""What a service writes to its log: one JSON object a line, whoever wrote it."""

from __future__ import annotations

import json
import subprocess
import sys

_PROGRAM = """
import logging
import structlog
from penstock.protocol import logs
logs.configure("reward")
structlog.contextvars.bind_contextvars(run_id="r")
log = structlog.get_logger("ours")
log.info("scored", group_id="g", text="two\\nlines", odd=object())
try:
    {}["missing"]
except KeyError:
    log.exception("failed")
    logging.getLogger("library").exception("failed too")
logging.getLogger("library").warning("%s is slow", "NATS")
logging.getLogger("library").info("not shown")
logging.getLogger("asyncio").warning("returning true from eof_received() has no effect when using ssl")
"""


def test_every_line_is_json_with_time_level_and_service() -> None:
    ended = subprocess.run([sys.executable, "-P", "-c", _PROGRAM], capture_output=True, text=True, check=True)
    assert ended.stdout == ""
    lines = [json.loads(line) for line in ended.stderr.splitlines()]
    assert [line["event"] for line in lines] == ["scored", "failed", "failed too", "NATS is slow"]
    assert [line["level"] for line in lines] == ["info", "error", "error", "warning"]
    for line in lines:
        assert line["timestamp"].endswith("Z")
        assert (line["service"], line["run_id"]) == ("reward", "r")
    assert lines[0]["text"] == "two\nlines"
    assert all("KeyError: 'missing'" in line["exception"] for line in lines[1:3])
    assert lines[3]["logger"] == "library"
