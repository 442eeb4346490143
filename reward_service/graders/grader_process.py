"""A grader process: reads jobs from stdin and writes answers to stdout, one JSON text a line.

    ← {"ready": true}
    → {"gold": "\\\\frac12", "answer": "0.5", "gold_cpu_s": 5.0, "cpu_s": 5.0}
    ← {"gold": true}                        what is compared with can be read; from now on the time is the answer's
    ← {"equal": true, "cpu_s": 0.01}        or {"exhausted": true, "cpu_s": ...} when the answer took all memory
    ← {"ended": -27}                        instead of either: the child that did the job has ended, by this signal

The jobs are done by a child that was forked after all imports, so that the end of one costs milliseconds. The kernel
bounds what a job may cost: a timer over the child's CPU time kills it by SIGPROF, which works inside C code too and
does not depend on how busy the machine is. Memory is bounded.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from penstock.protocol.parent_death import end_with_parent

_MEMORY_BYTES = 4 * 1024**3
_OUT_OF_MEMORY = 3  # exit code


def serve(
    read_gold: Callable[[str], Any], is_equal: Callable[[Any, str], bool], *, example: tuple[str, str] | None = None
) -> None:
    """Answer jobs until stdin ends.

    Args:
        read_gold: Reads what is compared with; something false when it cannot be read.
        is_equal: Returns whether an answer fits what ``read_gold`` returned.
        example: A job that is done once before the first fork, so that no job pays for filling caches.
    """
    logging.disable(logging.CRITICAL)  # math-verify warns that its time-outs are off, for every answer
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which then closes stdin
    if example is not None:
        is_equal(read_gold(example[0]), example[1])
    _write({"ready": True})
    while True:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _child(parent, read_gold, is_equal)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code == 0:
            return
        if code != _OUT_OF_MEMORY:
            _write({"ended": code})


def _child(parent: int, read_gold: Callable[[str], Any], is_equal: Callable[[Any, str], bool]) -> NoReturn:
    code = 1
    try:
        code = _do_jobs(read_gold, is_equal) if end_with_parent(parent) else 0
    except BaseException:  # noqa: BLE001 the service reports the exit code
        traceback.print_exc()
    finally:
        os._exit(code)


def _do_jobs(read_gold: Callable[[str], Any], is_equal: Callable[[Any, str], bool]) -> int:
    for line in sys.stdin:
        job = json.loads(line)
        _allow(job["gold_cpu_s"])
        try:
            gold = read_gold(job["gold"])
        except (MemoryError, RecursionError):
            _allow(0.0)
            _write({"gold": False})
            return _OUT_OF_MEMORY
        _allow(0.0)
        _write({"gold": bool(gold)})
        if gold:
            began = time.process_time()
            _allow(job["cpu_s"])
            try:
                equal = is_equal(gold, job["answer"])
            except (MemoryError, RecursionError):
                _allow(0.0)
                _write({"exhausted": True, "cpu_s": time.process_time() - began})
                return _OUT_OF_MEMORY  # a new child has its memory back
            _allow(0.0)
            _write({"equal": bool(equal), "cpu_s": time.process_time() - began})
    return 0


def _allow(cpu_s: float) -> None:
    """Limit this process to this many CPU seconds from now on; 0 removes the limit."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


def _write(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()
