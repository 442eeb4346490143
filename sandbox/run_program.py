"""Run a program once, without tests."""

from __future__ import annotations

import json

from penstock.sandbox.zygote_process import Limits, Run, Watch, Zygote


def run_program(zygote: Zygote, program: str, limits: Limits, *, stdin: str = "") -> Run:
    """Return how a program ended and what it wrote; `outcome.failure` says whose failure it is. Raises SandboxError."""
    with Watch(limits) as watch:
        job = json.dumps({"program": program}).encode()
        run = watch.start(zygote, "stdin", job=job, stdin=stdin.encode("utf-8", errors="surrogatepass"))
        watch.wait()
    return run
