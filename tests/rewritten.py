"""Rewrites the assertions of test files once for all processes of pytest-xdist.

In a fresh checkout every process would rewrite every file, eight CPU seconds each, and at the same time, since all of them
import the files in the same order. Here each begins with another file and leaves out what it finds done.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def rewrite_ahead(config: pytest.Config) -> None:
    """Write the files that pytest would write when it imports the tests, as far as they are missing."""
    worker = getattr(config, "workerinput", None)
    if worker is None or sys.dont_write_bytecode or rewrite.assertstate_key not in config.stash:
        return
    number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    given = [Path(argument.partition("::")[0]).absolute() for argument in config.args]
    files = sorted({path for folder in given for path in folder.rglob("test_*.py")})
    start = len(files) * number // count
    for path in (*files[start:], *files[:start]):
        stored = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
        if not stored.exists() and rewrite.try_makedirs(stored.parent):
            with contextlib.suppress(SyntaxError):  # is reported when the file is imported
                digest, code = rewrite._rewrite_test(path, config)
                rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, digest, stored)
