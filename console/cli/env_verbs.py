"""The verbs of `penstock env`: serve, test and list environments."""

from __future__ import annotations

from cyclopts import App

from penstock.console import launch
from penstock.console.cli.verb_parts import SERVE, Raw

app = App(name="env", help="Serve, test and list environments of several turns.", help_format="plaintext", group=SERVE)


@app.command
def serve(*arguments: Raw) -> None:
    """Serve the environment of a Python file over HTTP, for any number of workers.

    Example:  penstock env serve guess.py:Guess --port 8800
              penstock env serve guess.py:Guess --host 0.0.0.0 --secret-file key
    Then:     penstock env test http://127.0.0.1:8800
    """
    launch.replace_process(launch.module("penstock.rollout_service.hosting", "serve", *arguments))


@app.command
def test(*arguments: Raw) -> None:
    """Play episodes of an environment without a model; show lengths, rewards, errors and times.

    Ends with 1 if an episode failed, or if the same seed and answers made another episode.

    Example:  penstock env test frozen_lake
              penstock env test guess.py:Guess --episodes 50
              penstock env test http://127.0.0.1:8800 --script answers.txt
    Then:     name it in the run file: rollout.environment = "frozen_lake"
    """
    launch.replace_process(launch.module("penstock.rollout_service.hosting", "test", *arguments))


@app.command(name="list")
def list_environments(*arguments: Raw) -> None:
    """List the environments that a run may name, with their options.

    Example:  penstock env list
              penstock env list run.toml        also those that a run file defines
    Then:     penstock env test NAME
    """
    launch.replace_process(launch.module("penstock.rollout_service.hosting", "list", *arguments))
