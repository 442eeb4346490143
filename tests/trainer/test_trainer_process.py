"""The trainer's process: when it begins, what it imports ahead, garbage collections, and freed memory."""

from __future__ import annotations

import ctypes
import gc
import io
import subprocess
import sys

import psutil
import pytest

from penstock.trainer import __main__ as trainer
from penstock.trainer import process_memory
from penstock.trainer.commands.run_command import STOPPED, USAGE_ERROR

# What it imports later, by name: a second or more of a start would be waited for.
HEAVY = ("torch", "deepspeed", "transformers", "transformers.models.auto.modeling_auto", "penstock.trainer.assemble")


@pytest.mark.parametrize(("given", "code"), [("", STOPPED), ("\n", USAGE_ERROR)])
def test_it_begins_when_it_reads_a_line(
    given: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without one, because whoever started it has exited, the command is not run."""
    monkeypatch.setattr(trainer, "import_everything", lambda: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO(given))
    assert trainer.main(["--prepare", "train", "nowhere.toml"]) == code
    assert ("nowhere.toml" in capsys.readouterr().err) == bool(given)


def test_what_takes_long_is_imported_ahead() -> None:
    program = f"import sys; from penstock.trainer.__main__ import import_everything; import_everything(); sys.exit(bool(set({HEAVY}) - set(sys.modules)))"
    assert subprocess.run([sys.executable, "-P", "-c", program], timeout=300, check=False).returncode == 0


def test_collections_begin_again_when_the_start_has_ended() -> None:
    """What was built meanwhile is not collected again; where nothing disabled them, nothing changes."""
    frozen = gc.get_freeze_count()
    process_memory.end_start()
    assert gc.get_freeze_count() <= frozen
    gc.disable()
    try:
        process_memory.end_start()
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
    finally:
        gc.enable()


def test_freed_blocks_between_used_ones_are_returned_to_the_kernel() -> None:
    """Of many small blocks all but a few are freed: the pages between these go back."""
    if not process_memory.return_freed_memory():
        pytest.skip("the C library cannot return memory")
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    blocks = [libc.malloc(16_000) for _ in range(4000)]
    for block in blocks:
        ctypes.memset(block, 1, 16_000)
    for block in blocks[:-1]:
        libc.free(block)  # the last one keeps the heap's end where it is
    resident = psutil.Process().memory_info().rss
    process_memory.return_freed_memory()
    assert resident - psutil.Process().memory_info().rss > 30_000_000
    libc.free(blocks[-1])


_MULTIPLIES = """
import sys
from penstock.trainer.__main__ import main
assert main([]) == 2
import os
assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True" and "torch" not in sys.modules
import psutil, torch
weight = torch.zeros(256, 512, dtype=torch.bfloat16)
for tokens in range(40, 240):
    if tokens == 41:
        before = psutil.Process().memory_info().rss
    torch.zeros(tokens, 256, dtype=torch.bfloat16) @ weight
print(psutil.Process().memory_info().rss - before)
"""


def test_compiled_products_of_other_lengths_do_not_pile_up() -> None:
    """Rows of other lengths are other shapes, for each of which oneDNN compiles code: 130 MB of 200 shapes, if all of it is kept."""
    command = [sys.executable, "-P", "-c", _MULTIPLIES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 90_000_000
