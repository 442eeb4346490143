"""`penstock placement run.toml`: the placement of a run as text, as JSON, or as what a deployment reads; and as a line of `penstock doctor`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from penstock.console.tools.checks import Finding
from penstock.deploy.placement.placement import DoesNotFit, Placement
from penstock.deploy.placement.run_placement import RunPlacement, parse_gpus, place_run
from penstock.protocol.config.sources import ENVIRONMENT_PREFIX, split_arguments
from penstock.protocol.errors import PenstockError
from penstock.protocol.metrics.gpu import visible_gpus
from penstock.protocol.process_end import error_text

Form = Literal["trainer", "rollout", "compose", "kubernetes"]
_ADAPTERS = "model.lora.rank=16"
_ASSUMED = "80GB"  # of a GPU that is not here, where only the number is given
_TRIED = 4  # combinations of settings
_DOES_NOT_FIT, _ERROR = 1, 2  # exit codes
_SGLANG = ("worker.engine=sglang",)  # the servers of containers, which their run file reaches by URL
_PATCHES = """\
# Patches of deploy/kubernetes/overlays/gpu: save them there as placement.yaml, and add {{ path: placement.yaml }} to its patches.
apiVersion: apps/v1
kind: Deployment
metadata: {{ name: rollout }}
spec:
  replicas: {engines}
  template:
    spec:
      initContainers:
        - name: sglang
          env: [{{ name: SGLANG_TP, value: "{size}" }}]
          resources: {{ limits: {{ nvidia.com/gpu: "{size}" }} }}
---
apiVersion: batch/v1
kind: Job
metadata: {{ name: trainer }}
spec:
  template:
    spec:
      containers:
        - name: trainer
          env:
            - {{ name: PENSTOCK_TRAINER__NUM_RANKS, value: "{ranks}" }}
            - {{ name: PENSTOCK_TRAINER__ZERO_STAGE, value: "{stage}" }}
          resources: {{ limits: {{ nvidia.com/gpu: "{ranks}" }} }}
"""


def show_placement(
    arguments: Sequence[str], *, gpus: str | None, workers: int | None, env: Form | None, as_json: bool
) -> int:
    """Print the placement; returns 1 if engines and trainer do not fit, 2 for settings that are refused, after the reason on stderr."""
    is_container = env in ("compose", "kubernetes")
    try:
        words = [*arguments, *(_SGLANG if is_container else ())]
        planned = None if gpus is None else parse_gpus(gpus)
        placed = place_run(words, os.environ, workers=workers if env is None else 1, gpus=planned)
        if env is not None and not placed.placement.gpus:
            raise DoesNotFit(
                "this command sees no GPU to give out; run it on the machine of the run, or give --gpus 8x80GB"
            )
        if is_container and placed.placement.takes_turns:
            raise DoesNotFit(
                "engine and trainer fit on one GPU only in turns, which servers in containers of their own do not take; add a GPU"
            )
        if env == "kubernetes" and placed.placement.is_shared:
            raise DoesNotFit(
                "in Kubernetes engine and trainer have a GPU each, and there is one; add a GPU, or a node with one"
            )
    except PenstockError as err:
        sys.stderr.write(error_text(f"penstock placement: {err}\n"))
        return _DOES_NOT_FIT if isinstance(err, DoesNotFit) else _ERROR
    if as_json:
        sys.stdout.write(json.dumps(placed.document()) + "\n")
    elif env is None:
        sys.stdout.write("".join(f"{line}\n" for line in _lines(placed)))
    else:
        sys.stdout.write(_as_text(placed, env))
    return 0


def _lines(placed: RunPlacement) -> Iterator[str]:
    if not placed.placement.gpus:
        yield "no GPU: every process computes on the CPU"
        return
    yield from placed.placement.lines()
    if placed.overrides:
        yield f"settings that follow: {' '.join(placed.overrides)}"


def _as_text(placed: RunPlacement, env: Form) -> str:
    placement = placed.placement
    if env == "kubernetes":
        return _PATCHES.format(
            engines=len(placement.engines),
            size=placement.engine_size,
            ranks=len(placement.trainer),
            stage=placement.zero_stage,
        )
    variables = _of_compose(placement) if env == "compose" else _of_process(placed, env)
    return "".join(f"{name}={value}\n" for name, value in variables.items())


def _of_compose(placement: Placement) -> dict[str, str]:
    """Return the variables of deploy/compose.yaml, whose one SGLang server has a replica for each engine."""
    fraction = {"SGLANG_MEMORY_FRACTION": str(placement.engine_fraction)} if placement.engine_fraction else {}
    return {
        "SGLANG_GPUS": ",".join(gpu.id for engine in placement.engines for gpu in engine),
        "SGLANG_TP": str(placement.engine_size),
        "SGLANG_DP": str(len(placement.engines)),
        **fraction,
        "TRAINER_GPUS": ",".join(gpu.id for gpu in placement.trainer),
        "TRAINER_RANKS": str(len(placement.trainer)),
        "TRAINER_ZERO_STAGE": str(placement.zero_stage),
    }


def _of_process(placed: RunPlacement, role: Form) -> dict[str, str]:
    own = placed.of_trainer() if role == "trainer" else placed.of_worker(0)
    prefix = "trainer." if role == "trainer" else ("sglang.", "vllm.")
    settings = [override.split("=", 1) for override in placed.overrides if override.startswith(prefix)]
    return own | {ENVIRONMENT_PREFIX + key.replace(".", "__").upper(): value for key, value in settings}


def finding(arguments: Sequence[str], environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the placement of a run file as a finding of `penstock doctor`; nothing without one, or without GPUs."""
    if not split_arguments(arguments)[0]:
        return
    try:
        lines = place_run(arguments, environ).placement.lines()
    except PenstockError as err:
        yield Finding("placement", "fail", str(err), "penstock placement run.toml shows it for other settings")
        return
    if lines:
        yield Finding("placement", "ok" if len(lines) == 1 else "warn", "; ".join(lines))


def settings_that_fit(gpus: str, settings: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return settings with which a new run fits on GPUs, besides ``settings``, and lines that say so: as it is, or else with adapters.

    ``gpus`` is a number, of those here or else of 80 GB each, or a text such as 8x80GB. Raises ConfigError for another.
    """
    here = visible_gpus(os.environ) if gpus.isdecimal() else []
    are_here = gpus.isdecimal() and len(here) >= int(gpus)
    planned = here[: int(gpus)] if are_here else parse_gpus(f"{gpus}x{_ASSUMED}" if gpus.isdecimal() else gpus)
    notes = (
        [f"these GPUs are not here: {_ASSUMED} each assumed; or give --gpus 8x24GB"]
        if gpus.isdecimal() and not are_here
        else []
    )
    reasons: list[DoesNotFit] = []
    tried: list[list[str]] = [[], [_ADAPTERS]]  # adapters before states in host memory, which are slower
    while tried:
        more = tried.pop(0)
        try:
            placed = place_run([*settings, *more], {}, gpus=planned)
        except DoesNotFit as err:
            reasons.append(err)
            if err.settings and len(reasons) < _TRIED:
                tried.append([*more, *err.settings])
                tried.sort(key=lambda one: _ADAPTERS not in one)
        else:
            because = [f"without {' '.join(more)}: {reasons[0]}"] if more else []
            return more, [*placed.placement.lines(), *because, *notes]
    return [], [f"it does not fit: {reasons[0]}", *notes]
