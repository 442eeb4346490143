"""`python -m penstock.trainer config run.toml [overrides]`: every setting of the trainer with its origin."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from penstock.protocol.config.run_file import config_document, format_config, load, split_arguments
from penstock.protocol.secret_values import hide
from penstock.trainer.settings import TrainerSettings


def main(arguments: Sequence[str]) -> int:
    files, overrides = split_arguments([argument for argument in arguments if argument != "--json"])
    loaded = load(TrainerSettings, files=files, overrides=overrides, environ=os.environ)
    as_json = "--json" in arguments
    document = {"settings": hide((), config_document(loaded)["settings"]), "origins": loaded.origins}
    sys.stdout.write(json.dumps(document) + "\n" if as_json else format_config(loaded))
    return 0
