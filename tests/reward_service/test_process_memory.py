"""The reward service's process: all its threads share one heap."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_PROGRAM = """
import ctypes, sys, threading
from penstock.serving.web_server import use_one_heap

if sys.argv[1] == "shared" and not use_one_heap():
    sys.exit(3)
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
libc.malloc_info.argtypes, libc.fclose.argtypes = [ctypes.c_int, ctypes.c_void_p], [ctypes.c_void_p]
together = threading.Barrier(4)

def allocate():
    together.wait()
    for _ in range(100):
        libc.malloc(1000)
    together.wait()

threads = [threading.Thread(target=allocate) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
file = libc.fopen(sys.argv[2].encode(), b"w")
libc.malloc_info(0, file)
libc.fclose(file)
"""


def num_heaps(mode: str, folder: Path) -> int:
    file = folder / f"{mode}.xml"
    environ = {"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin"}
    subprocess.run([sys.executable, "-c", _PROGRAM, mode, file], check=True, timeout=300, env=environ)
    return file.read_text().count("<heap nr=")


def test_threads_share_one_heap(tmp_path: Path) -> None:
    assert (num_heaps("shared", tmp_path), num_heaps("own", tmp_path) > 1) == (1, True)
