"""Import the modules of the console with less CPU: without garbage collection and libraries it does not use."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_UNUSED = ("aiohttp",)  # nats imports it where it is installed, for addresses with ws://


@contextmanager
def lean_imports() -> Iterator[None]:
    """Collect no garbage in the block, and let imports of unused modules fail there as if they were not installed.

    What is imported stays until the process exits: searching it for garbage takes a sixth of the CPU of an import. For
    a process that has one thread; after the block these modules can be imported.
    """
    hidden = [name for name in _UNUSED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type] # None makes an import raise ModuleNotFoundError
    gc.disable()
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        gc.freeze()  # what is there now is left out of later collections too
        gc.enable()
