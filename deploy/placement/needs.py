"""What engines and trainer of a run need of GPUs, from their settings and the shape of the model; reads config.json and no weights."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.deploy.placement.planner import EngineNeed, TrainerNeed
from penstock.deploy.plan.memory.memory_plan import MemoryPlan, suggestions
from penstock.deploy.plan.memory.model_shape import BFLOAT16, FLOAT32, ModelShape, read_shape
from penstock.deploy.plan.memory.plan_inputs import plan_inputs
from penstock.protocol.config.run_file import Loaded, load
from penstock.rollout_service.engines.engine_kind import StartedServerSettings
from penstock.rollout_service.settings import RolloutSettings
from penstock.trainer.errors import NotEstimated
from penstock.trainer.settings import TrainerSettings

_STAGES = (1, 2, 3)
_SIZES = (1, 2, 4, 8)
_QUANTIZED = 1  # byte of a weight, at most: fp8, int8
_PREFIX_CACHE = 512 * 2**20  # bytes that the embedded engine keeps at most by default


def trainer_on_gpu(
    files: Sequence[Path], overrides: Sequence[str], environ: Mapping[str, str]
) -> Loaded[TrainerSettings]:
    """Return the trainer's settings; where none says otherwise, model.dtype is what the trainer takes on a GPU. Raises ConfigError."""
    loaded = load(TrainerSettings, files=files, overrides=overrides, environ=environ)
    if loaded.origins["model.dtype"] != "default":
        return loaded
    return load(TrainerSettings, files=files, overrides=[*overrides, "model.dtype=bfloat16"], environ=environ)


def shape_of_model(folder: Path) -> ModelShape | None:
    try:
        return read_shape(folder, "model.path")
    except NotEstimated:
        return None


def server_settings(rollout: RolloutSettings) -> StartedServerSettings | None:
    """Return the settings of the servers that a worker starts on GPUs; None: it starts none, or the run file gives them theirs."""
    options = rollout.engine_options if rollout.worker.kind.section in ("sglang", "vllm") else None
    if not isinstance(options, StartedServerSettings) or "CUDA_VISIBLE_DEVICES" in options.environ:
        return None
    return None if getattr(options, "device", None) == "cpu" else options


def engine_need(
    loaded: Loaded[RolloutSettings], trainer: TrainerSettings | None, workers: int | None
) -> EngineNeed | None:
    """Return what the engines need that the workers start; None: no GPU, or GPUs that are not known here.

    ``trainer``: None where this machine does not know the run's settings; then the engines' memory is not checked.
    """
    rollout = loaded.settings
    shape = None if trainer is None else shape_of_model(trainer.model.path)
    row = 0 if trainer is None else trainer.data.max_prompt_tokens + trainer.rollout.max_new_tokens
    if (servers := server_settings(rollout)) is not None:
        group = row * (1 if trainer is None else trainer.rollout.largest_group)
        is_set = any(loaded.origins[f"{servers.section}.{key}"] != "default" for key in _keys_of_size(servers))
        sizes = [size for size in _SIZES if shape is None or not shape.heads % size]
        return EngineNeed(
            section=servers.section,
            sizes=(servers.gpus,) if is_set or servers.gpus > 1 else tuple(sizes),
            engines=None if loaded.origins[f"{servers.section}.engines"] == "default" else servers.engines,
            workers=workers,
            weights=_weights(shape, trainer, _width(servers)),
            cache=group * _bytes_of_token(shape),
            fraction=servers.fraction,
            may_release=rollout.problem_of_turns is None,
        )
    worker = rollout.worker
    if worker.engine != "embedded" or not worker.device.startswith("cuda"):
        return None
    return EngineNeed(
        section="worker",
        sizes=(1,),
        engines=None,
        workers=workers,
        weights=_weights(shape, trainer, FLOAT32 if worker.dtype == "float32" else BFLOAT16),
        cache=worker.max_running * row * _bytes_of_token(shape) + _PREFIX_CACHE,
        fraction=None,
        takes_fraction=False,
        one_of_worker=True,
        may_release=rollout.problem_of_turns is None,
    )


def trainer_need(loaded: Loaded[TrainerSettings], *, nodes: int = 1, takes_all: bool = False) -> TrainerNeed:
    """Return what a rank needs; of several nodes each has the same number of ranks."""
    settings = loaded.settings
    is_set = nodes > 1 or loaded.origins["trainer.num_ranks"] != "default"
    layout, rows = settings.trainer.layout, settings.rollout.groups_per_step * settings.rollout.group_size
    return TrainerNeed(
        ranks=max(1, settings.trainer.num_ranks // nodes) if is_set else None,
        stages=_stages(loaded),
        peak=functools.partial(_peak, settings, nodes),
        advice=functools.partial(_advice, settings, nodes),
        multiple=layout.ranks_of_rows,
        most=rows * layout.ranks_of_rows,
        takes_all=takes_all,
    )


def _stages(loaded: Loaded[TrainerSettings]) -> tuple[int, ...]:
    trainer = loaded.settings.trainer
    if loaded.origins["trainer.zero_stage"] != "default":
        return (trainer.zero_stage,)
    return tuple(stage for stage in _STAGES if stage >= trainer.zero_stage)


def _keys_of_size(servers: StartedServerSettings) -> list[str]:
    return [
        key for key in (servers.size_key, "ep_size", "dp_size", "gpus_per_engine") if key in type(servers).model_fields
    ]


def _width(servers: StartedServerSettings) -> int:
    if servers.quantization is not None:
        return _QUANTIZED
    return FLOAT32 if servers.dtype == "float32" else BFLOAT16


def _weights(shape: ModelShape | None, trainer: TrainerSettings | None, width: int) -> int | None:
    if shape is not None:
        return shape.parameters * width
    files = [] if trainer is None else list(trainer.model.path.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files) or None


def _bytes_of_token(shape: ModelShape | None) -> int:
    """Return the bytes of keys and values of one token, in bfloat16."""
    return 0 if shape is None else 2 * shape.layers * shape.key_value * BFLOAT16


def _plan(settings: TrainerSettings, nodes: int, ranks: int, stage: int) -> MemoryPlan:
    placed = settings.trainer.model_copy(update={"num_ranks": ranks * nodes, "zero_stage": stage})
    shapes = {
        key: None if path is None else read_shape(path, where)
        for key, path, where in (
            ("reference", settings.algorithm.reference_path, "algorithm.reference_path"),
            ("critic", settings.critic.path, "critic.path"),
        )
    }
    shape = read_shape(settings.model.path, "model.path")
    return MemoryPlan(plan_inputs(settings.model_copy(update={"trainer": placed}), shape, **shapes))


def _peak(settings: TrainerSettings, nodes: int, ranks: int, stage: int) -> int | None:
    try:
        return _plan(settings, nodes, ranks, stage).peak(on_gpu=True)
    except NotEstimated:
        return None


def _advice(settings: TrainerSettings, nodes: int, ranks: int, stage: int, limit: int) -> tuple[str, ...]:
    """Return settings with which a rank fits into ``limit`` bytes on the same GPUs; () if none are known."""
    inputs = _plan(settings, nodes, ranks, stage).inputs
    found = suggestions(inputs, limit, on_gpu=True, may_add_ranks=False)
    if not found:
        return ()
    text = " ".join(found[0].settings)
    taken = []  # from the layout that was tried, for settings that the program refuses beside the one that is set
    if "trainer.offload=" in text and "trainer.zero_stage=" not in text and stage != settings.trainer.zero_stage:
        taken.append(f"trainer.zero_stage={stage}")
    if "_parallel=" in text and ranks * nodes != settings.trainer.num_ranks:
        taken.append(f"trainer.num_ranks={ranks * nodes}")
    return (*found[0].settings, *taken)
