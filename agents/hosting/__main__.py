"""``python -m penstock.agents.hosting serve|register|drain|resume|test|list``: the commands of `penstock env`."""

from __future__ import annotations

import sys

from penstock.agents.hosting.commands import app
from penstock.protocol import process_end
from penstock.protocol.command_line import run
from penstock.protocol.errors import PenstockError
from penstock.protocol.process_end import error_text


def main() -> int:
    process_end.install("environment")
    try:
        return run(app)
    except PenstockError as err:
        sys.stderr.write(error_text(f"penstock: {err}\n"))
        return 1


if __name__ == "__main__":
    sys.exit(main())
