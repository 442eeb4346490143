"""A grader process: reads jobs from stdin and writes answers to stdout, one JSON text a line.

    ← {"ready": true}
    → {"gold": "\\\\frac12", "answer": "0.5", "cpu_s": 5.0}
    ← {"gold": true}                   what is compared with can be read; from now on the time is the answer's
    ← {"equal": true}

The kernel bounds what a job may cost: a timer over this process's CPU time kills it by SIGPROF, which
works inside C code too and does not depend on how busy the machine is. Memory is bounded.
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

_MEMORY_BYTES = 4 * 1024**3


def serve(read_gold: Callable[[str], Any], is_equal: Callable[[Any, str], bool]) -> None:
    """Answer jobs until stdin ends.

    Args:
        read_gold: Reads what is compared with; something false when it cannot be read.
        is_equal: Returns whether an answer fits what ``read_gold`` returned.
    """
    logging.disable(logging.CRITICAL)  # math-verify warns that its own time-outs are off, for every answer
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which then closes stdin
    _write({"ready": True})
    for line in sys.stdin:
        job = json.loads(line)
        _allow(job["cpu_s"])
        gold = read_gold(job["gold"])
        _allow(0.0)
        _write({"gold": bool(gold)})
        if gold:
            _allow(job["cpu_s"])
            equal = is_equal(gold, job["answer"])
            _allow(0.0)
            _write({"equal": bool(equal)})


def _allow(cpu_s: float) -> None:
    """Limit this process to this many CPU seconds from now on; 0 removes the limit."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


def _write(message: dict[str, bool]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()
