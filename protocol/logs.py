"""Configure logging the same way in every service: structured lines, coloured on a terminal, else JSON.

Lines go to stderr; stdout is for a command's result. Ids are always called ``run_id``,
``group_id``, ``worker_id`` and ``policy_version``.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO, cast

import structlog

from penstock.protocol import process_end
from penstock.protocol.secret_values import scrub


class _Stderr:
    """Write to the current ``sys.stderr``: it may be replaced, and closed, after configuration."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


_STDERR = cast(TextIO, _Stderr())
_OF_EVERY_LINE = (
    structlog.contextvars.merge_contextvars,
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
)


def configure(service: str, *, level: str = "info") -> None:
    process_end.install(service)
    as_json = not sys.stderr.isatty()
    renderer = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[*_OF_EVERY_LINE, structlog.processors.format_exc_info, _without_secrets, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(file=_STDERR),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    of_libraries = logging.StreamHandler(_STDERR)
    of_libraries.setFormatter(_json_format() if as_json else _LineFormat("%(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[of_libraries])
    logging.getLogger("asyncio").addFilter(_concerns_us)


class _LineFormat(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return scrub(super().format(record))


def _without_secrets(_logger: object, _method: str, event: structlog.types.EventDict) -> structlog.types.EventDict:
    return {name: _scrubbed(value) for name, value in event.items()}


def _scrubbed(value: Any) -> Any:
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, dict):
        return {name: _scrubbed(item) for name, item in value.items()}
    return [_scrubbed(item) for item in value] if isinstance(value, list | tuple | set | frozenset) else value


def _concerns_us(record: logging.LogRecord) -> bool:
    """Leave out what asyncio warns of at the end of every connection that nats-py encrypted with ``start_tls``."""
    return not str(record.msg).startswith("returning true from eof_received()")


def _json_format() -> logging.Formatter:
    """Return the format that makes a library's line, its traceback included, one JSON line like ours."""
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*_OF_EVERY_LINE, structlog.stdlib.add_logger_name],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            _without_secrets,
            structlog.processors.JSONRenderer(),
        ],
    )
