"""Errors of memory, GPUs, drivers and other ranks are named by the texts that libraries print."""

from __future__ import annotations

import errno

import pytest
import torch

from penstock.protocol.errors import BlobCorrupt
from penstock.protocol.hardware_errors import fault_in, fault_of, table
from penstock.protocol.process_end import explain

OOM = (
    "CUDA out of memory. Tried to allocate 22.78 GiB. GPU 3 has a total capacity of 79.11 GiB of which 12.73 GiB is free. "
    "Process 4711 has 14.72 GiB memory in use. Including non-PyTorch memory, this process has 51.66 GiB memory in use. Of the "
    "allocated memory 41.08 GiB is allocated by PyTorch, and 9.35 GiB is reserved by PyTorch but unallocated. If reserved but "
    "unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
ASYNC = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect."
    "\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1.\nDevice-side assertion tracking was not enabled by user."
)
NCCL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, "
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"
TIMEOUT = (
    "[rank3]:[E1218 20:27:21.426415540 ProcessGroupNCCL.cpp:684] [Rank 3] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=1, OpType=BROADCAST, NumelIn=131072000, NumelOut=131072000, Timeout(ms)=600000) ran for 600081 milliseconds "
    "before timing out."
)
TEXTS = [  # of exceptions: class, text, name in the table
    (torch.OutOfMemoryError, OOM, "gpu_memory"),
    (torch.OutOfMemoryError, "Allocation on device 0 would exceed allowed memory. (out of memory)", "gpu_memory"),
    (torch.AcceleratorError, f"CUDA error: out of memory{ASYNC}", "gpu_memory"),
    (RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "gpu_memory"),
    (torch.distributed.DistBackendError, f"{NCCL}unhandled cuda error, NCCL version 2.28.9\nncclUnhandledCudaError: Call to CUDA "
     "function failed.\nLast error:\nCuda failure 2 'out of memory'", "gpu_memory"),
    (MemoryError, "", "host_memory"),
    (RuntimeError, "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
     "70368744177664 bytes. Error code 12 (Cannot allocate memory)", "host_memory"),
    (torch.AcceleratorError, f"CUDA error: uncorrectable ECC error encountered{ASYNC}", "broken_gpu"),
    (torch.AcceleratorError, f"CUDA error: uncorrectable NVLink error detected during the execution{ASYNC}", "broken_gpu"),
    (torch.AcceleratorError, f"CUDA error: an illegal memory access was encountered{ASYNC}", "kernel"),
    (torch.AcceleratorError, f"CUDA error: device-side assert triggered{ASYNC}", "kernel"),
    (torch.AcceleratorError, f"CUDA error: unspecified launch failure{ASYNC}", "kernel"),
    (torch.AcceleratorError, f"CUDA error: misaligned address{ASYNC}", "kernel"),
    (RuntimeError, "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( ... )`", "kernel"),
    (torch.AcceleratorError, f"CUDA error: no kernel image is available for execution on the device{ASYNC}", "other_gpu"),
    (torch.AcceleratorError, f"CUDA error: the provided PTX was compiled with an unsupported toolchain.{ASYNC}", "other_gpu"),
    (AssertionError, "Torch not compiled with CUDA enabled", "other_gpu"),
    (RuntimeError, "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from "
     "http://www.nvidia.com/Download/index.aspx", "driver"),
    (RuntimeError, "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver", "driver"),
    (torch.AcceleratorError, f"CUDA error: CUDA driver version is insufficient for CUDA runtime version{ASYNC}", "driver"),
    (RuntimeError, "CUDA driver initialization failed, you might not have a CUDA gpu.", "driver"),
    (RuntimeError, "No CUDA GPUs are available", "no_gpu"),
    (torch.AcceleratorError, f"CUDA error: no CUDA-capable device is detected{ASYNC}", "no_gpu"),
    (torch.AcceleratorError, f"CUDA error: invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?{ASYNC}", "no_gpu"),
    (torch.AcceleratorError, f"CUDA error: CUDA-capable device(s) is/are busy or unavailable{ASYNC}", "gpu_in_use"),
    (RuntimeError, "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that "
     "might have already set an error? Error 802: system not yet initialized", "gpu_in_use"),
    (torch.distributed.DistBackendError, f"{NCCL}remote process exited or there was a network error, NCCL version 2.28.9\n"
     "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.", "peer"),
    (torch.distributed.DistBackendError, "NCCL communicator was aborted on rank 1. ", "peer"),
    (torch.distributed.DistNetworkError, "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown "
     "or crash?", "peer"),
    (RuntimeError, f"{GLOO}pair.cc:547] Connection closed by peer [127.0.0.1]:26532", "peer"),
    (RuntimeError, f"{GLOO}pair.cc:537] Read error [127.0.0.1]:26532: Connection reset by peer", "peer"),
    (RuntimeError, f"{GLOO}unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete", "timeout"),
    (torch.distributed.DistStoreError, "wait timeout after 300000ms, keys: /default_pg/0//cpu//0/1", "timeout"),
    (torch.distributed.DistBackendError, "NCCL timeout in communicator initialization.", "timeout"),
    (torch.distributed.DistBackendError, f"{NCCL}unhandled cuda error, NCCL version 2.28.9", "call"),
    (torch.AcceleratorError, f"CUDA error: operation not permitted{ASYNC}", "call"),
    (torch.OutOfMemoryError, "of a device that this file does not know", "gpu_memory"),
]  # fmt: skip
LOGS = [
    (TIMEOUT, "timeout"),
    ("ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives.", "timeout"),
    ("failed (exitcode: -9) local_rank: 5 (pid: 2630) of binary: /usr/bin/python", "killed"),
    ("  exitcode  : -6 (pid: 2385922)\n  traceback : Signal 6 (SIGABRT) received by PID 2385922", "killed"),
    ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: 0.2", "gpu_memory"),
    ("ValueError: Free memory on device (59.32/79.15 GiB) on startup is less than desired GPU memory utilization (0.9, 71.24 GiB).", "gpu_memory"),
    ("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`", "gpu_memory"),
    ("OSError: [Errno 28] No space left on device: '/dev/shm/x'", "disk_full"),
    (f"{GLOO}pair.cc:547] Connection closed by peer [127.0.0.1]:1\ntorch.OutOfMemoryError: {OOM}", "gpu_memory"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "name"), TEXTS)
def test_an_exception_of_the_hardware_is_named_with_a_fix(kind: type[Exception], text: str, name: str) -> None:
    """Also as the cause of another exception; its line is no internal error."""
    wrapped = RuntimeError("training failed")
    wrapped.__cause__ = err = kind(text)
    fault = fault_of(ExceptionGroup("all", [err]))
    assert fault is not None
    assert fault.name == name
    assert fault_of(wrapped) == fault
    line = explain("trainer", err)
    assert "internal error" not in line
    assert "; " in line
    assert "\n" not in line


@pytest.mark.parametrize(("text", "name"), LOGS)
def test_the_end_of_a_log_tells_as_much(text: str, name: str) -> None:
    """A cause counts before what follows from it on another rank."""
    fault = fault_in(f"started\n{text}\nended\n")
    assert fault is not None
    assert fault.name == name


def test_numbers_places_and_settings_are_read_from_the_text() -> None:
    err = torch.OutOfMemoryError(OOM)
    err.add_note("micro-batch of 16384 tokens")
    fault = fault_of(err, rank=2)
    assert fault is not None
    assert fault.usable_bytes == int(12.73 * 2**30) + int(41.08 * 2**30) + int(9.35 * 2**30)
    assert fault.text() == (
        "out of GPU memory on GPU 3, rank 2 (22.78 GiB requested, 12.73 GiB of 79.11 GiB free, 14.72 GiB in use by other "
        "processes, which `nvidia-smi` lists, in a micro-batch of 16384 tokens); set trainer.micro_batch_tokens below 16384, "
        "model.gradient_checkpointing = true, trainer.zero_stage up; `penstock plan RUN.toml --gpu --rank-memory 64675MiB` "
        "computes what fits"
    )
    assert fault.text("sglang").endswith("sglang.max_running_requests down")
    assert fault.text("embedded_engine").endswith("set worker.max_running and worker.kept_tokens down")
    timeout = fault_in(TIMEOUT)
    assert timeout is not None
    assert (timeout.rank, timeout.is_transient, fault.is_transient) == (3, True, False)
    assert "continues from its newest checkpoint" in timeout.text()


def test_other_exceptions_are_not_of_the_hardware() -> None:
    """Nor are Penstock's own errors, whose texts name their fix, whatever they quote."""
    others = [
        RuntimeError("shape mismatch"),
        ValueError(OOM),
        OSError(errno.ENOENT, "none"),
        BlobCorrupt(OOM),
        KeyError(),
    ]
    assert [fault_of(err) for err in others] == [None] * len(others)
    assert fault_in("everything is well\n") is None
    assert fault_in("") is None


def test_every_situation_has_a_text_above() -> None:
    names = {name for *_, name in TEXTS} | {name for _, name in LOGS}
    assert names == {situation["name"] for situation in table()["situation"]}
