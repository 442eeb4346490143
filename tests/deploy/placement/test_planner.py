"""Which GPUs engines and trainer get: by memory where nothing is set, as the run file says where something is."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.deploy.placement.hosts import model_of

from penstock.deploy.placement.placement import DoesNotFit
from penstock.deploy.placement.run_placement import RunPlacement, parse_gpus, place_run
from penstock.protocol.errors import ConfigError
from penstock.protocol.metrics.gpu import Gpu

SGLANG = ["worker.engine=sglang", "model.gradient_checkpointing=true"]
LORA = "model.lora.rank=16"
MIG = [Gpu(n, f"MIG-{n}", "NVIDIA H100 MIG 1g.20gb", 20 * 10**9, 0, is_mig=True) for n in range(4)]


def placed(
    tmp_path: Path, shape: str, gpus: str | list[Gpu], *settings: str, engine: list[str] = SGLANG, **more: object
) -> RunPlacement:
    found = parse_gpus(gpus) if isinstance(gpus, str) else gpus
    return place_run([f"model.path={model_of(tmp_path, shape)}", *engine, *settings], {}, gpus=found, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "gpus", "settings", "line", "overrides"),
    [
        ("0.6B", "1x80GB", [], "GPU 0 engines (1 x tp 1, 0.71 of the memory), GPU 0 trainer (1 rank, ZeRO 1)", ["sglang.mem_fraction_static=0.71"]),
        ("0.6B", "1x18GB", [], "GPU 0 engines (1 x tp 1, 0.69 of the memory), GPU 0 trainer (1 rank, ZeRO 1): shared in turns", ["placement.shared=turns", "sglang.mem_fraction_static=0.69"]),
        ("unknown", "1x80GB", ["placement.shared=turns"], "GPU 0 engines (1 x tp 1, 0.87 of the memory), GPU 0 trainer (1 rank, ZeRO 1): shared in turns", ["sglang.mem_fraction_static=0.87"]),
        ("0.6B", "2x80GB", [], "GPU 0 engines (1 x tp 1), GPU 1 trainer (1 rank, ZeRO 1)", []),
        ("0.6B", "8x80GB", [], "GPU 0-6 engines (7 x tp 1), GPU 7 trainer (1 rank, ZeRO 1)", ["sglang.engines=7"]),
        ("7B", "1x80GB", [LORA], "GPU 0 engines (1 x tp 1, 0.57 of the memory), GPU 0 trainer (1 rank, ZeRO 1)", ["sglang.mem_fraction_static=0.57"]),
        ("7B", "8x80GB", [], "GPU 0-3 engines (4 x tp 1), GPU 4-7 trainer (4 ranks, ZeRO 2)", ["trainer.num_ranks=4", "trainer.zero_stage=2", "sglang.engines=4"]),
        ("7B", "8x80GB", ["trainer.num_ranks=6"], "GPU 0-1 engines (2 x tp 1), GPU 2-7 trainer (6 ranks, ZeRO 1)", ["sglang.engines=2"]),
        ("7B", "8x80GB", ["sglang.tp_size=2"], "GPU 0-3 engines (2 x tp 2), GPU 4-7 trainer (4 ranks, ZeRO 2)", ["trainer.num_ranks=4", "trainer.zero_stage=2", "sglang.engines=2"]),
        ("7B", "8x80GB", ["sglang.extra_args=['--pp-size=2']"], "GPU 0-3 engines (2 x tp 2), GPU 4-7 trainer (4 ranks, ZeRO 2)", ["trainer.num_ranks=4", "trainer.zero_stage=2", "sglang.engines=2"]),
        ("7B", "8x80GB", ["placement.engines=[1,0]", "placement.trainer=[4,5,6,7]"], "GPU 0-1 engines (2 x tp 1), GPU 4-7 trainer (4 ranks, ZeRO 2)", ["trainer.num_ranks=4", "trainer.zero_stage=2", "sglang.engines=2"]),
        ("7B", "8x80GB", ["placement.engines=2"], "GPU 0-1 engines (2 x tp 1), GPU 4-7 trainer (4 ranks, ZeRO 2)", ["trainer.num_ranks=4", "trainer.zero_stage=2", "sglang.engines=2"]),
        ("7B", "4x80GB", [LORA, "placement.shared=beside"], "GPU 0-3 engines (4 x tp 1, 0.60 of the memory), GPU 0-3 trainer (4 ranks, ZeRO 1)", ["trainer.num_ranks=4", "sglang.engines=4", "sglang.mem_fraction_static=0.6"]),
        ("32B", "8x80GB", [LORA], "GPU 0-5 engines (3 x tp 2), GPU 6-7 trainer (2 ranks, ZeRO 3)", ["trainer.num_ranks=2", "trainer.zero_stage=3", "sglang.engines=3", "sglang.tp_size=2"]),
        ("unknown", "8x80GB", [], "GPU 0-3 engines (4 x tp 1), GPU 4-7 trainer (4 ranks, ZeRO 1)", ["trainer.num_ranks=4", "sglang.engines=4"]),
    ],
)  # fmt: skip
def test_gpus_are_divided_by_memory(
    tmp_path: Path, shape: str, gpus: str, settings: list[str], line: str, overrides: list[str]
) -> None:
    """What a run file sets is kept, and the rest follows; a GPU is shared only if there is one, or on purpose."""
    found = placed(tmp_path, shape, gpus, *settings)
    assert found.placement.lines()[0].startswith(line)
    assert list(found.overrides) == overrides
    assert found.placement.is_shared == ("of the memory" in line)
    assert (
        place_run(
            [f"model.path={model_of(tmp_path, shape)}", *SGLANG, *settings, *overrides], {}, gpus=parse_gpus(gpus)
        ).overrides
        == ()
    )


@pytest.mark.parametrize(
    ("shape", "gpus", "settings", "words"),
    [
        ("7B", "2x80GB", [], r"a rank of the trainer needs 145\.7 GB on 1 GPU\(s\) with ZeRO 1, and 73\.6 GB of each can be used; it fits with"),
        ("7B", "1x80GB", ["placement.shared=never", LORA], "an engine needs 1 GPUs and the trainer one|0 of 1 are left"),
        ("7B", "1x24GB", [LORA], r"a rank needs 24\.4 GB, an engine 15\.8 GB .* and 22\.1 GB can be used"),
        ("0.6B", "2x80GB", ["sglang.engines=2"], r"1 worker\(s\) with 2 engine\(s\) of 1 GPU\(s\) need 2 GPUs, and 1 of 2 are left for engines"),
        ("32B", "8x80GB", [LORA, "sglang.tp_size=1", "sglang.dtype=float32"], r"an engine needs \d+\.\d GB for weights, keys and values on each of 1 GPU\(s\)"),
        ("0.6B", "2x80GB", ["placement.trainer=[2]"], "names GPU 2, and this command sees 2"),
        ("0.6B", "2x80GB", ["trainer.num_ranks=4"], "the trainer needs 4 GPUs, and 1 of 2 are left for it"),
        ("0.6B", "4x80GB", ["trainer.num_ranks=4", "placement.trainer=2"], "placement.trainer has 2 GPUs and trainer.num_ranks = 4"),
        ("0.6B", "1x18GB", ["placement.shared=beside"], "do not fit on GPU 0 at once: a rank needs 13.4 GB"),
        ("0.6B", "1x16GB", [], "do not fit on GPU 0 in turns: a rank needs 13.4 GB, an engine 2.4 GB"),
        ("unknown", "1x80GB", [], "the trainer's memory cannot be estimated for this model"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_numbers(
    tmp_path: Path, shape: str, gpus: str, settings: list[str], words: str
) -> None:
    with pytest.raises(DoesNotFit, match=words):
        placed(tmp_path, shape, gpus, *settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["placement.engines=[0,1]", "placement.trainer=[1]"], "both name GPU 1"),
        (["placement.engines=[0,0]"], "names a GPU twice"), (["placement.engines=0"], "expected a number of at least 1"),
    ],
)  # fmt: skip
def test_a_gpu_is_given_out_once(tmp_path: Path, settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        placed(tmp_path, "0.6B", "2x80GB", *settings)


def test_the_settings_of_a_refusal_make_the_run_fit(tmp_path: Path) -> None:
    """And the program takes them, also where they need the stage or the ranks of the layout that was tried."""
    dense = ["worker.engine=sglang"]
    cases: list[tuple[str, str, list[str], dict[str, object]]] = [
        ("7B", "2x80GB", [], {}), ("7B", "1x80GB", [], {}), ("32B", "8x80GB", [], {}),
        ("32B", "8x80GB", ["trainer.num_ranks=2"], {"engine": dense}),
        ("32B", "8x80GB", ["placement.engines=2"], {"engine": dense, "role": "trainer"}),
    ]  # fmt: skip
    for shape, gpus, settings, more in cases:
        with pytest.raises(DoesNotFit) as refused:
            placed(tmp_path, shape, gpus, *settings, **more)  # type: ignore[arg-type]
        found = placed(tmp_path, shape, gpus, *settings, *refused.value.settings, **more)  # type: ignore[arg-type]
        assert found.placement.trainer


def test_the_workers_of_an_evaluation_divide_all_gpus(tmp_path: Path) -> None:
    found = placed(tmp_path, "0.6B", "8x80GB", role="engines", workers=2)
    assert [len(found.placement.of_worker(number)) for number in (0, 1)] == [4, 4]
    assert "sglang.engines=4" in found.overrides


def test_gpus_in_use_are_left_out_unless_the_run_file_lists_them(tmp_path: Path) -> None:
    gpus = [Gpu(n, str(n), "H100", 80 * 10**9, (70 if n in (0, 3) else 1) * 10**9) for n in range(4)]
    found = placed(tmp_path, "0.6B", gpus)
    assert [[gpu.number for gpu in engine] for engine in found.placement.engines] == [[1]]
    assert found.of_trainer()["CUDA_VISIBLE_DEVICES"] == "2"
    assert found.placement.lines()[1] == "GPU 0: 70.0 GB of 80.0 GB are used by other processes: left out"
    with pytest.raises(DoesNotFit, match=r"GPU 3: 70\.0 GB of 80\.0 GB are used by other processes"):
        placed(tmp_path, "0.6B", gpus, "placement.trainer=[3]")
    with pytest.raises(DoesNotFit, match="end them, set CUDA_VISIBLE_DEVICES"):
        placed(tmp_path, "0.6B", [gpus[0], gpus[3]])


def test_parts_of_a_divided_gpu_are_not_joined(tmp_path: Path) -> None:
    """Each is an engine with a worker of its own, or a trainer of one rank."""
    found = placed(tmp_path, "0.6B", MIG)
    assert found.num_workers == 3
    assert [found.of_worker(number) for number in range(3)] == [{"CUDA_VISIBLE_DEVICES": f"MIG-{n}"} for n in range(3)]
    assert found.of_trainer() == {"CUDA_VISIBLE_DEVICES": "MIG-3"}
    with pytest.raises(DoesNotFit, match="do not work together"):
        placed(tmp_path, "0.6B", MIG, "sglang.tp_size=2")
    with pytest.raises(DoesNotFit, match="do not work together"):
        placed(tmp_path, "0.6B", MIG, "trainer.num_ranks=2")


@pytest.mark.parametrize(
    ("settings", "trainer", "engines"),
    [
        ([], "0,1,2,3,4,5,6,7", "0,1,2,3,4,5,6,7"), (["placement.trainer=4"], "4,5,6,7", "0,1,2,3"),
        (["placement.trainer=[0,2]", "placement.engines=[5]"], "0,2", "5"), (["trainer.num_ranks=2"], "0,1", "0,1,2,3,4,5,6,7"),
    ],
)  # fmt: skip
def test_a_command_of_one_role_has_the_gpus_that_the_run_file_gives_it(
    tmp_path: Path, settings: list[str], trainer: str, engines: str
) -> None:
    """Or all, without [placement]; with it two commands of one machine have their parts, whichever starts first."""
    settings = [LORA, *settings]
    for number, (role, visible) in enumerate((("trainer", trainer), ("engines", engines))):
        gpus = parse_gpus("8x80GB")
        if number and any("placement" in one for one in settings):  # the other runs already
            gpus = [Gpu(g.number, g.id, g.name, g.total, g.total // 2 if g.id in trainer else 0) for g in gpus]
        found = placed(tmp_path, "7B", gpus, *settings, role=role)
        variables = found.of_trainer() if role == "trainer" else found.of_worker(0)
        assert variables == {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def test_gpus_that_others_use_are_not_given_to_a_role(tmp_path: Path) -> None:
    gpus = [Gpu(g.number, g.id, g.name, g.total, g.total // 2) for g in parse_gpus("8x80GB")]
    with pytest.raises(
        DoesNotFit, match=r"GPU 6: 40\.0 GB of 80\.0 GB are used by other processes; .* change placement.trainer"
    ):
        placed(tmp_path, "7B", gpus, LORA, "placement.trainer=2", role="trainer")


@pytest.mark.parametrize(
    ("engine", "trainer", "workers"),
    [
        ([], "0", None), (["worker.engine=sglang-url", "worker.engine_url=http://h:1"], "0", None),
        (["worker.engine=sglang", "sglang.device=cpu"], "0", None), (["worker.device=cuda", "worker.dtype=bfloat16"], "3", "0"),
    ],
)  # fmt: skip
def test_engines_without_gpus_leave_them_alone(
    tmp_path: Path, engine: list[str], trainer: str, workers: str | None
) -> None:
    """The trainer gets one then, as before; an embedded engine on GPUs has one, with a worker of its own."""
    found = placed(tmp_path, "0.6B", "4x80GB", "model.gradient_checkpointing=true", engine=engine)
    assert found.of_trainer()["CUDA_VISIBLE_DEVICES"] == trainer
    assert found.of_worker(0).get("CUDA_VISIBLE_DEVICES") == workers
    assert (found.num_workers, found.of_others()) == ((3, {"CUDA_VISIBLE_DEVICES": ""}) if workers else (2, {}))


def test_nodes_have_as_many_gpus_as_their_share_of_the_ranks(tmp_path: Path) -> None:
    settings = ["trainer.num_ranks=16", "trainer.zero_stage=3"]
    found = placed(tmp_path, "7B", "8x80GB", *settings, role="trainer", nodes=2)
    assert (len(found.placement.trainer), found.overrides) == (8, ())
    with pytest.raises(DoesNotFit, match="the trainer needs 8 GPUs, and 4 of 4 are left for it"):
        placed(tmp_path, "7B", "4x80GB", *settings, role="trainer", nodes=2)


def test_without_gpus_nothing_follows_and_a_list_of_them_is_refused() -> None:
    """Not even the settings are read."""
    assert place_run(["model.path=m"], {}, gpus=[]) == RunPlacement()
    with pytest.raises(DoesNotFit, match="this command sees none"):
        place_run(["model.path=m", "placement.trainer=[0]"], {}, gpus=[])
