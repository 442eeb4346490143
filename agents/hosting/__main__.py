"""``python -m penstock.agents.hosting serve|register|drain|resume|test|list``: what `penstock env` starts."""

from __future__ import annotations

import sys

from penstock.agents.hosting import list_environments, register, serve, try_environment
from penstock.protocol import process_end
from penstock.protocol.errors import PenstockError

_COMMANDS = {
    "serve": serve.main,
    "register": register.main,
    "drain": register.drain,
    "resume": register.resume,
    "test": try_environment.main,
    "list": list_environments.main,
}


def main() -> int:
    """Run one command; returns the exit status."""
    process_end.install("environment")
    command, *rest = sys.argv[1:] or [""]
    if command not in _COMMANDS:
        sys.stderr.write(f"expected one of {', '.join(_COMMANDS)}, got {command!r}\n")
        return 2
    try:
        return _COMMANDS[command](rest)
    except PenstockError as err:
        sys.stderr.write(f"penstock: {err}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
