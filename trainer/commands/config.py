"""`python -m penstock.trainer config run.toml [overrides]`: every setting of the trainer with its origin."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from penstock.protocol.config.run_file import config_document, format_config, load, split_arguments
from penstock.trainer.settings import TrainerSettings


def main(arguments: Sequence[str]) -> int:
    files, overrides = split_arguments([argument for argument in arguments if argument != "--json"])
    loaded = load(TrainerSettings, files=files, overrides=overrides, environ=os.environ)
    as_json = "--json" in arguments
    sys.stdout.write(json.dumps(config_document(loaded)) + "\n" if as_json else format_config(loaded))
    return 0
