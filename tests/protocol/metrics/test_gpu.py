"""GPU figures through NVML's interface; the machine of the tests has no GPU, so the library is a stand-in."""

from __future__ import annotations

import threading

import pynvml
import pytest
from tests.protocol.metrics.nvml import Card, Nvml
from tests.servers import wait_for

from penstock.protocol.errors import ConfigError, GpusUnknown, PenstockError
from penstock.protocol.metrics import gpu
from penstock.protocol.metrics.gpu import GpuSampler, visible_gpus
from penstock.protocol.metrics.table import LabelValues, Samples

FIRST = {
    "gpu_count": 1.0,
    **{f"gpu_utilisation_{one}": 0.9 for one in ("min", "mean", "max")},
    **{f"gpu_memory_{one}": 0.5 for one in ("min", "mean", "max")},
    **{f"gpu_temperature_c_{one}": 60.0 for one in ("min", "mean", "max")},
    **{f"gpu_power_w_{one}": 312.5 for one in ("min", "mean", "max")},
}
BOTH = {
    "gpu_count": 2.0,
    "gpu_utilisation_min": 0.3, "gpu_utilisation_mean": 0.6, "gpu_utilisation_max": 0.9,
    "gpu_memory_min": 0.25, "gpu_memory_mean": 0.375, "gpu_memory_max": 0.5,
    "gpu_temperature_c_min": 50.0, "gpu_temperature_c_mean": 55.0, "gpu_temperature_c_max": 60.0,
    "gpu_power_w_min": 312.5, "gpu_power_w_mean": 312.5, "gpu_power_w_max": 312.5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, BOTH), ("0,1", BOTH), ("0", FIRST), ("GPU-aa", FIRST), ("0, 7,1", FIRST)]
)
def test_the_gpus_of_a_service_are_read(visible: str | None, expected: dict[str, float]) -> None:
    """Least, mean and greatest of what each tells; CUDA's list ends at the first GPU that does not exist."""
    nvml = Nvml()
    with GpuSampler(nvml, visible=visible) as gpus:
        wait_for(gpus.figures, "a sample")
        assert gpus.figures() == pytest.approx(expected)


@pytest.mark.parametrize("visible", ["", "7", "GPU-cc"])
def test_a_service_without_gpus_has_no_figures(visible: str) -> None:
    """None is visible: nothing is read, and the library is closed."""
    nvml = Nvml()
    with GpuSampler(nvml, visible=visible) as gpus:
        wait_for(lambda: nvml.is_shut_down, "the library to be closed")
        assert (gpus.figures(), nvml.num_reads) == ({}, 0)


def test_a_machine_without_a_driver_has_no_figures() -> None:
    """Neither an error nor a thread that goes on; the real package says the same here if there is no driver."""
    with GpuSampler(Nvml(init_error=pynvml.NVML_ERROR_DRIVER_NOT_LOADED)) as gpus:
        wait_for(lambda: not any(one.name == "gpu" for one in threading.enumerate()), "the thread to end")
        assert gpus.figures() == {}


def test_a_driver_that_hangs_leaves_no_old_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """After three periods the last sample is none of now; the block ends without waiting for the driver."""
    now = 100.0
    monkeypatch.setattr(gpu, "PERIOD_S", 0.01)
    nvml = Nvml()
    with GpuSampler(nvml, clock=lambda: now) as gpus:
        wait_for(gpus.figures, "a sample")
        nvml.hangs.set()
        wait_for(nvml.is_hanging.is_set, "the driver to hang")
        now = 114.0
        assert gpus.figures()
        now = 116.0
        assert gpus.figures() == {}


def test_figures_have_names_for_prometheus() -> None:
    samples = Samples("rollout", LabelValues())
    gpu.add_samples(BOTH, samples, role="rollout", worker="w0")
    gpu.add_samples({"tokens_per_s": 1.0}, samples, role="rollout", worker="w1")
    assert samples.series["penstock_gpus"] == {("rollout", "w0"): 2.0}
    assert samples.series["penstock_gpu_utilisation_ratio"] == {
        ("rollout", "w0", "min"): 0.3,
        ("rollout", "w0", "mean"): 0.6,
        ("rollout", "w0", "max"): 0.9,
    }
    assert samples.series["penstock_gpu_power_watts"]["rollout", "w0", "max"] == 312.5


MIXED = (
    Card("GPU-1a"),
    Card("GPU-1b", parts=(Card("MIG-b0", total=20), Card("MIG-b1", total=40))),
    Card("GPU-2c", name="NVIDIA A10G", total=24),
)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["0", "MIG-b0", "MIG-b1", "2"]), ("", []), ("-1", []), ("NoDevFiles", []), ("2, 0", ["2", "0"]), ("2,7,0", ["2"]),
        ("0,-1,2", ["0"]), ("1", ["MIG-b0"]), ("GPU-2c,MIG-b1", ["GPU-2c", "MIG-b1"]), ("GPU-2,GPU-1a", ["GPU-2c", "GPU-1a"]),
        ("none", []),
    ],
)  # fmt: skip
def test_a_command_sees_the_gpus_that_cuda_shows(visible: str | None, expected: list[str]) -> None:
    """By number, UUID or its unambiguous beginning, up to the first that there is not; parts of a divided card in its place."""
    environ = {} if visible is None else {gpu.VISIBLE: visible}
    gpus = visible_gpus(environ, Nvml(MIXED))
    assert [one.id for one in gpus] == expected
    assert [one.number for one in gpus] == list(range(len(gpus)))
    assert all(one.is_mig == one.id.startswith("MIG-") for one in gpus)
    assert [one.total for one in gpus if one.id == "MIG-b1"] == [40 * 2**30] * expected.count("MIG-b1")


def test_a_uuid_stands_for_the_number_that_sglang_reads() -> None:
    """SGLang 0.5.23 reads CUDA_VISIBLE_DEVICES as integers where several GPUs share layers; the order of numbers is the driver's."""
    environ = {gpu.VISIBLE: "GPU-3c, GPU-1a", gpu.ORDER: "FASTEST_FIRST"}
    gpus = visible_gpus(environ, Nvml([Card("GPU-1a"), Card("GPU-2b"), Card("GPU-3c", name="NVIDIA A10G", total=24)]))
    assert [(one.id, one.uuid) for one in gpus] == [("2", "GPU-3c"), ("0", "GPU-1a")]


@pytest.mark.parametrize(
    ("environ", "init_error", "error", "words"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,2,0"}, None, ConfigError, "names a GPU twice"),
        ({"CUDA_VISIBLE_DEVICES": "2,GPU-2c"}, None, ConfigError, "names a GPU twice"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1"}, None, ConfigError, "its first name is that of no GPU here"),
        ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, None, ConfigError, "set it to PCI_BUS_ID"),
        ({}, pynvml.NVML_ERROR_NO_PERMISSION, GpusUnknown, "refuses to list the GPUs"),
    ],
)
def test_gpus_that_cannot_be_told_apart_are_refused(
    environ: dict[str, str], init_error: int | None, error: type[PenstockError], words: str
) -> None:
    with pytest.raises(error, match=words):
        visible_gpus(environ, Nvml(MIXED, init_error=init_error))


def test_a_driver_that_hangs_is_named_after_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_DRIVER_S", 0.05)
    nvml = Nvml()
    nvml.hangs.set()
    with pytest.raises(GpusUnknown, match="did not list its GPUs within"):
        visible_gpus({}, nvml)
