"""The verbs of `penstock env`: serve, register, try and list environments."""

from __future__ import annotations

from cyclopts import App

from penstock.console import launch
from penstock.console.cli.verb_parts import SERVE, Raw

app = App(
    name="env",
    help="Serve, register, try and list environments of several turns.",
    help_format="plaintext",
    group=SERVE,
)


@app.command
def serve(*arguments: Raw) -> None:
    """Serve the environment of a Python file over HTTP, for any number of workers.

    Example:  penstock env serve guess.py:Guess --port 8800
              penstock env serve guess.py:Guess --host 0.0.0.0 --secret-file key
              penstock env serve guess.py:Guess run.toml --register guess
    Then:     penstock env test http://127.0.0.1:8800
    """
    launch.replace_process(launch.module("penstock.agents.hosting", "serve", *arguments))


@app.command
def register(*arguments: Raw) -> None:
    """Register a running environment server, in any language, and renew its lease while it answers.

    Example:  penstock env register http://10.0.0.7:8800 run.toml --name guess
              penstock env register http://10.0.0.7:8800 nats.url=nats://10.0.0.1:4222 --replace
    Then:     name it in the run file: options = { registered = "guess" }
    """
    launch.replace_process(launch.module("penstock.agents.hosting", "register", *arguments))


@app.command
def drain(*arguments: Raw) -> None:
    """Take the servers of a registered environment out of service; their episodes go on.

    Example:  penstock env drain guess run.toml
              penstock env drain guess run.toml --url http://10.0.0.7:8800
    Then:     penstock env resume guess run.toml
    """
    launch.replace_process(launch.module("penstock.agents.hosting", "drain", *arguments))


@app.command
def resume(*arguments: Raw) -> None:
    """Put drained servers of a registered environment back into service.

    Example:  penstock env resume guess run.toml
    Then:     penstock env list --registered run.toml
    """
    launch.replace_process(launch.module("penstock.agents.hosting", "resume", *arguments))


@app.command
def test(*arguments: Raw) -> None:
    """Play episodes of an environment without a model; show lengths, rewards, errors and times.

    Ends with 1 if an episode failed, or if the same seed and answers made another episode.

    Example:  penstock env test frozen_lake
              penstock env test guess.py:Guess --episodes 50
              penstock env test http://127.0.0.1:8800 --script answers.txt
    Then:     name it in the run file: rollout.environment = "frozen_lake"
    """
    launch.replace_process(launch.module("penstock.agents.hosting", "test", *arguments))


@app.command(name="list")
def list_environments(*arguments: Raw) -> None:
    """List the environments that a run may name, with their options.

    Example:  penstock env list
              penstock env list run.toml        also those that a run file defines
              penstock env list --registered run.toml      the servers that are registered on its NATS
    Then:     penstock env test NAME
    """
    launch.replace_process(launch.module("penstock.agents.hosting", "list", *arguments))
