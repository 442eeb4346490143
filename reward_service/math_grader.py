"""One grader process of the math reward: ``python -m reward_service.math_grader``.

Reads jobs from stdin and writes answers to stdout, one JSON text a line:

    ← {"ready": true}
    → {"gold": "\\\\frac12", "answer": "0.5", "cpu_s": 5.0}
    ← {"gold": true}                   the gold answer parses; from now on the time is the answer's
    ← {"equal": true}

The kernel bounds what a job may cost: a timer over this process's CPU time kills it by SIGPROF, which
works inside C code too and does not punish an answer for a busy machine. math-verify's own time-outs
(SIGALRM, wall clock) are off. Memory is bounded, so that a tower of powers ends in a MemoryError.
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

from math_verify import parse, verify
from math_verify.parser import LatexExtractionConfig

_MEMORY_BYTES = 4 * 1024**3
_KNOWN_GOLDS = 256


def main() -> None:
    """Answer jobs until stdin ends."""
    logging.disable(logging.CRITICAL)  # it warns that its own time-outs are off, for every answer
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which then closes stdin
    _say({"ready": True})
    for line in sys.stdin:
        _grade(json.loads(line))


def _grade(job: dict[str, Any]) -> None:
    _allow(job["cpu_s"])
    gold = _parse_gold(job["gold"])
    _allow(0.0)
    _say({"gold": bool(gold)})
    if gold:
        _allow(job["cpu_s"])
        answer = _parse(job["answer"])
        equal = bool(answer) and verify(list(gold), answer, timeout_seconds=None)
        _allow(0.0)
        _say({"equal": bool(equal)})


def _allow(cpu_s: float) -> None:
    """Let this process use so many CPU seconds from now on; 0 takes the limit away."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


@lru_cache(_KNOWN_GOLDS)
def _parse_gold(text: str) -> tuple[Any, ...]:
    """Parse the gold answer, and compare it with 0 once: what it costs by itself is not an answer's fault."""
    gold = _parse(text)
    verify(gold, _parse("0"), timeout_seconds=None)
    return tuple(gold)


def _parse(text: str) -> list[Any]:
    return parse(
        f"\\boxed{{{text}}}",
        extraction_config=[LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        parsing_timeout=None,  # pyright: ignore[reportArgumentType] None is what switches it off
    )


def _say(message: dict[str, bool]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
