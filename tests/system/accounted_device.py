"""A device whose memory is accounted in a file: what the trainer and the engines of a run have there, and who asked for more than it has.

`ACCOUNTED` is the embedded engine on it, `accounted` a policy loss that puts the trainer that uses it there too. A killed process
has nothing on it any more, as with a real driver. Both find the file by the environment variable `VARIABLE`.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.protocol.config.connection import Section
from penstock.protocol.versions import PolicyVersion
from penstock.rollout_service.engines.embedded import EmbeddedClient
from penstock.rollout_service.engines.engine_kind import EngineKind, ServerLaunch
from penstock.trainer.algorithm.losses.interface import LossTerms, Tokens, none_of, policy_loss

VARIABLE = "ACCOUNTED_DEVICE"
CAPACITY = 100  # of which trainer and engine need 60 each
NEED = 60


def change(role: str, size: int) -> None:
    """Have this process hold ``size`` on the device; raises as CUDA does, and notes it, where all hold more than it has."""
    with Path(os.environ[VARIABLE]).open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        account = json.loads(file.read() or '{"held": {}, "refused": [], "changes": 0}')
        held = {pid: one for pid, one in account["held"].items() if _runs(int(pid))}
        held[str(os.getpid())] = [role, size]
        account["held"], account["changes"] = held, account["changes"] + 1
        if is_refused := sum(size for _, size in held.values()) > CAPACITY:
            account["refused"].append(held)
        file.seek(0)
        file.truncate()
        file.write(json.dumps(account))
    if is_refused:
        raise RuntimeError("CUDA out of memory. Tried to allocate 60 bytes")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _after(owner: Any, name: str, then: Callable[[], None]) -> None:
    method = getattr(owner, name)

    def both(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        then()
        return result

    setattr(owner, name, both)


def _before(owner: Any, name: str, first: Callable[[], None]) -> None:
    method = getattr(owner, name)

    def both(*args: Any, **kwargs: Any) -> Any:
        first()
        return method(*args, **kwargs)

    setattr(owner, name, both)


@policy_loss(source="a test", uses_ratio=False)
def accounted(tokens: Tokens) -> LossTerms:
    """Return ``L = -A log p``."""
    ratio = tokens.log_ratio.detach().exp()
    return LossTerms(-tokens.advantages * tokens.current, ratio, none_of(ratio), none_of(ratio))


def _account_trainer() -> None:
    from penstock.trainer.learner.host_states import HostStates
    from penstock.trainer.learner.trainable import Trainable

    _before(Trainable, "__init__", lambda: change("trainer", NEED))
    _before(HostStates, "move_back", lambda: change("trainer", NEED))
    _after(HostStates, "move_out", lambda: change("trainer", 0))


def _launches(options: Section, environ: Mapping[str, str]) -> list[ServerLaunch]:
    def command(folder: Path, version: PolicyVersion, port_file: Path) -> list[str]:
        return [
            sys.executable, __file__, "--model-path", str(folder), "--host", "127.0.0.1", "--port", "0", "--port-file", str(port_file),
            "--max-running", "16", "--weight-version", str(version), "--die-with-parent", "--parent-pid", str(os.getpid()),
        ]  # fmt: skip

    return [ServerLaunch(command, "engine.log")]


ACCOUNTED = EngineKind("accounted", EmbeddedClient, _launches)


def _run_engine() -> int:
    from penstock.rollout_service.embedded_engine import __main__ as engine
    from penstock.rollout_service.embedded_engine.runner import Runner

    set_weights = Runner.weights.fset
    assert set_weights is not None

    def set_accounted(runner: Runner, weights: Any) -> None:
        change("engine", NEED)
        set_weights(runner, weights)

    Runner.weights = Runner.weights.setter(set_accounted)  # type: ignore[method-assign]
    _before(Runner, "__init__", lambda: change("engine", NEED))
    _after(Runner, "release", lambda: change("engine", 0))
    return engine.main()


if __name__ == "__main__":
    sys.exit(_run_engine())
elif getattr(sys.modules["__main__"].__spec__, "name", "").startswith("penstock.trainer."):
    _account_trainer()
