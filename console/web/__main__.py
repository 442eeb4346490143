"""``python -m penstock.console.web run.dir=FOLDER``: the console that a local run starts beside it, on a free port.

It is what ``penstock console --port 0 --json`` does, without the arguments and help texts of all verbs, whose import
takes as much CPU as a tenth of the console's start.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from penstock.console.lean_imports import lean_imports
from penstock.protocol import process_end
from penstock.protocol.errors import PenstockError
from penstock.protocol.process_end import error_text


def main(arguments: Sequence[str]) -> int:
    process_end.install("console")
    with lean_imports():
        from penstock.console.web.serve import serve  # noqa: PLC0415

    try:
        return serve(arguments, os.environ, port=0, as_json=True)
    except PenstockError as err:
        print(error_text(f"penstock: {err}"), file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
