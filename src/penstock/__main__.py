"""``python -m penstock``: the `penstock` command."""

from __future__ import annotations

from penstock.console.cli.main import main

if __name__ == "__main__":
    main()
