"""The commands of `penstock env` and of ``python -m penstock.agents.hosting``; imports nothing slow before one is run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from penstock.protocol.command_line import FLAT, Help, Host, Json, Port, RunArguments, SigningKeys, application

LEASE_S = 15.0

Registered = Annotated[str, Help("The name under which they are registered.")]
OnlyUrl = Annotated[str | None, Help("Only the server at this URL; default all of the name.")]

app = application("env", help="Serve, register, try and list environments of several turns.")


@dataclass(frozen=True, kw_only=True)
class LeaseOptions:
    """How long a registration lasts, and whether it replaces another."""

    lease_s: Annotated[float, Help("Seconds without a renewal after which it is out of service.")] = LEASE_S
    replace: Annotated[bool, Help("Take over the name from servers of another version, which end their episodes.")] = (
        False
    )


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """Which servers are called, and by which authorities and keys they are trusted."""

    secret_file: Annotated[Path | None, Help("File with the server's signing keys.")] = None
    ca_file: Annotated[Path | None, Help("Certificates of the authorities that an https server is trusted by.")] = None
    allowed_target: Annotated[
        tuple[str, ...],
        Help("Network or host name of servers that may be called; repeatable; default loopback and private ranges."),
    ] = ()


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Where an environment is served, and its limits."""

    host: Host = "127.0.0.1"
    port: Port = 0
    capacity: Annotated[int, Help("Episodes that are played at once.")] = 256
    reply_s: Annotated[float, Help("Seconds that the environment may take for one reply.")] = 60.0
    idle_s: Annotated[float, Help("Seconds without a call after which an episode is closed.")] = 900.0
    drain_s: Annotated[float, Help("Seconds that episodes in progress may take after Ctrl-C.")] = 60.0
    secret_file: SigningKeys = None
    register: Annotated[str, Help("Register it on NATS under this name.")] = ""
    url: Annotated[str | None, Help("URL at which workers reach it, to register; default from host and port.")] = None


@dataclass(frozen=True, kw_only=True)
class TrialOptions:
    """Episodes that are played without a model."""

    episodes: Annotated[int, Help("Episodes of each policy.")] = 20
    seed: Annotated[int, Help("Seed of the first episode; each next one has the next.")] = 0
    script: Annotated[Path | None, Help("File with the answers of the scripted policy, one a line.")] = None
    answer_format: Annotated[str, Help("How the script writes calls of tools.")] = "hermes"
    options: Annotated[str, Help("Options of the environment, as a JSON object.")] = "{}"
    max_turns: Annotated[int, Help("Turns of one episode.")] = 16
    prompt: Annotated[str, Help("Last message of the row's prompt.")] = "get 37"
    ground_truth: Annotated[str, Help("The row's ground truth, as JSON.")] = "null"
    extra_info: Annotated[str, Help("The row's extra_info, as a JSON object.")] = "{}"
    run_file: Annotated[
        Path | None, Help("Run file that defines the environment; its options and limits are used.")
    ] = None
    secret_file: Annotated[Path | None, Help("File with the server's signing keys.")] = None
    json: Json = False


@app.command
def serve(
    environment: Annotated[str, Help("FILE.py:CLASS, module:CLASS, or the name of a built-in or installed one.")],
    *settings: RunArguments,
    options: Annotated[ServeOptions, FLAT] = ServeOptions(),
    lease: Annotated[LeaseOptions, FLAT] = LeaseOptions(),
) -> int:
    """Serve the environment of a Python file over HTTP, for any number of workers.

    The file holds a class like the one of docs/environments.md: a TurnEnvironment whose `play` makes a Play with `start` and
    `step`. Run files name it with type = "http" in [environment.define.NAME]. /openapi.json describes the API, for servers in
    other languages. Ctrl-C unregisters it, takes no new episodes and lets those in progress end; a second Ctrl-C exits at once.

    Example:  penstock env serve guess.py:Guess --port 8800
              penstock env serve guess.py:Guess --host 0.0.0.0 --secret-file key
              penstock env serve guess.py:Guess run.toml --register guess
    Then:     penstock env test http://127.0.0.1:8800
    """
    from penstock.agents.hosting.serve import serve_environment

    return serve_environment(environment, settings, options, lease)


@app.command
def register(
    url: Annotated[str, Help("URL of the server, as workers reach it.")],
    *settings: RunArguments,
    name: Annotated[str, Help("Name that run files use; default as the server calls itself.")] = "",
    lease: Annotated[LeaseOptions, FLAT] = LeaseOptions(),
    targets: Annotated[TargetOptions, FLAT] = TargetOptions(),
) -> int:
    """Register a running environment server, in any language, and renew its lease while it answers.

    The server is asked for its version and capacity before it is registered and before each renewal of its lease: one that
    does not answer is out of service --lease-s after its last answer. Ctrl-C unregisters it, and its episodes go on.

    Example:  penstock env register http://10.0.0.7:8800 run.toml --name guess
              penstock env register http://10.0.0.7:8800 nats.url=nats://10.0.0.1:4222 --replace
    Then:     name it in the run file: options = { registered = "guess" }
    """
    from penstock.agents.hosting.registration import register_server

    return register_server(url, settings, name, lease, targets)


@app.command
def drain(name: Registered, *settings: RunArguments, url: OnlyUrl = None) -> int:
    """Take the servers of a registered environment out of service; their episodes go on.

    Example:  penstock env drain guess run.toml
              penstock env drain guess run.toml --url http://10.0.0.7:8800
    Then:     penstock env resume guess run.toml
    """
    from penstock.agents.hosting.registration import set_drained

    return set_drained(name, settings, url, drained=True)


@app.command
def resume(name: Registered, *settings: RunArguments, url: OnlyUrl = None) -> int:
    """Put drained servers of a registered environment back into service.

    Example:  penstock env resume guess run.toml
    Then:     penstock env list --registered run.toml
    """
    from penstock.agents.hosting.registration import set_drained

    return set_drained(name, settings, url, drained=False)


@app.command(name="test")
def try_out(
    environment: Annotated[str, Help("A name, FILE.py:CLASS, or the URL of an environment server.")],
    *,
    options: Annotated[TrialOptions, FLAT] = TrialOptions(),
) -> int:
    """Play episodes of an environment without a model; show lengths, rewards, errors and times.

    Plays each seed with a policy that answers at random: words and numbers of the last message, calls of tools with arguments
    that fit their schema. With --script also with one that answers the lines of a file. One episode is played twice, to see
    whether the same seed and the same answers make the same episode.

    Ends with 1 if an episode failed, or if the same seed and answers made another episode.

    Example:  penstock env test frozen_lake
              penstock env test guess.py:Guess --episodes 50
              penstock env test http://127.0.0.1:8800 --options '{"highest": 20}' --script answers.txt
              penstock env test my-env --run-file run.toml
    Then:     name it in the run file: rollout.environment = "frozen_lake"
    """
    from penstock.agents.hosting.trial import try_environment

    return try_environment(environment, options)


@app.command(name="list")
def list_environments(
    *settings: RunArguments,
    json: Json = False,
    registered: Annotated[
        bool, Help("List the registered environment servers instead: versions, states, episodes, leases.")
    ] = False,
) -> int:
    """List the environments that a run may name, with their options.

    Example:  penstock env list
              penstock env list run.toml        also those that a run file defines
              penstock env list --registered run.toml      the servers that are registered on its NATS
    Then:     penstock env test NAME
    """
    from penstock.agents.hosting.list_environments import print_environments

    return print_environments(settings, as_json=json, registered=registered)
