"""A process that fails by an unexpected exception ends with one line that says where, and what to do."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from penstock.protocol.errors import MalformedFact
from penstock.protocol.facts import decode
from penstock.protocol.groups import BlobRef
from penstock.protocol.process_end import explain


def _inside_the_package() -> BaseException:
    try:
        decode(None, BlobRef)  # type: ignore[arg-type, type-var]
    except MalformedFact as err:
        raise AssertionError from err
    except Exception as err:  # noqa: BLE001 - whatever it is
        return err
    raise AssertionError


@pytest.mark.parametrize(
    ("err", "expected"),
    [
        (AttributeError("no 'x'"), "penstock trainer: internal error, please report it with the traceback above: AttributeError: no 'x'"),
        (OSError(errno.ENOSPC, "No space left on device", "/a"), "the disk is full (OSError: [Errno 28] No space left on device: '/a'); free disk space"),
        (MemoryError(), "penstock trainer: out of memory; start it where more memory is free"),
        (ExceptionGroup("two", [KeyError("a\nb"), ValueError()]), "traceback above: KeyError: 'a\\nb'"),
        (_inside_the_package(), "(protocol/facts.py:"),
        (ValueError("long " * 1000), "ValueError: long long"),
    ],
)  # fmt: skip
def test_the_line_names_error_place_and_fix(err: BaseException, expected: str) -> None:
    line = explain("trainer", err)
    assert expected in line
    assert "\n" not in line
    assert len(line) < 700


def test_it_is_the_last_line_of_the_process() -> None:
    code = "from penstock.protocol import process_end as i; i.install('worker'); None.x"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 1
    lines = ended.stderr.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1].startswith(
        "penstock worker: internal error, please report it with the traceback above: AttributeError"
    )
