"""`penstock reward list | test | drain | resume | remove`: calls the HTTP API of a running reward service."""

from __future__ import annotations

import json
import ssl
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from penstock.console import connections, launch
from penstock.console.printable import printable
from penstock.console.tables import console
from penstock.protocol.errors import ConfigError, PenstockError
from penstock.protocol.transport import http_tls
from penstock.protocol.transport.tls import handshake_problem

if TYPE_CHECKING:
    import httpx

_CONNECT_S = 3.0
_ANSWER_S = 120.0  # an endpoint may be a slow judge
_EXAMPLE = ("4", "#### 4", "\\boxed{5}")


class RewardServiceError(PenstockError):
    """The reward service is unreachable, or refuses a request."""


class RewardService:
    """The HTTP API of one reward service."""

    def __init__(self, url: str, token_file: Path | None = None, *, answer_s: float = _ANSWER_S) -> None:
        """``token_file`` holds the bearer token, if the service requires one; raises ConfigError when unreadable.

        ``answer_s`` is how long an answer is waited for.
        """
        self._answer_s = answer_s
        self._url = url.rstrip("/")
        self._headers: dict[str, str] = {}
        self._tls: ssl.SSLContext | None = None  # made once: reading the system's authorities costs 20 ms of CPU
        if token_file is not None:
            try:
                self._headers["Authorization"] = f"Bearer {token_file.read_text(encoding='utf-8').strip()}"
            except OSError as err:
                raise ConfigError(f"--token-file {token_file}: not readable ({err.strerror})") from None

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the service's answer; raises RewardServiceError when it does not answer or refuses."""
        import httpx  # noqa: PLC0415 # the page's console starts without it

        timeout = httpx.Timeout(self._answer_s, connect=_CONNECT_S)
        if self._tls is None:
            self._tls = http_tls.trust_own_authority(httpx.create_ssl_context())
        try:
            with httpx.Client(headers=self._headers, timeout=timeout, trust_env=False, verify=self._tls) as client:
                response = client.request(method, f"{self._url}{path}", json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as err:
            if problem := handshake_problem(err, self._url, http_tls.AUTHORITY):
                raise RewardServiceError(problem) from None
            raise RewardServiceError(
                f"no reward service answers at {self._url} ({type(err).__name__}); "
                "start one with: penstock reward service run.toml (it needs NATS and S3: penstock up), or name another with --url"
            ) from None
        if response.is_success:
            try:
                return response.json() if response.content else None
            except (ValueError, RecursionError):
                raise RewardServiceError(
                    f"what answers at {self._url} is no reward service: its answer to {path} is not JSON; check --url"
                ) from None
        hint = "; name its token with --token-file" if response.status_code == httpx.codes.UNAUTHORIZED else ""
        raise RewardServiceError(f"the reward service at {self._url} refused the request: {_detail(response)}{hint}")


def service_url(url: str | None, serve: Sequence[Path], more: Sequence[str], typed: Sequence[str]) -> str:
    """Return the URL of the reward service: the given one, else the one of this machine.

    If none answers there, or files are to be served, the ``typed`` command is started again with a service of its own,
    which gets ``more`` arguments (`deploy/scoring.py`); then this does not return. Raises ConfigError.
    """
    if url is not None:
        if serve:
            raise ConfigError(
                "--serve starts a reward service for this command, and --url names another; leave out one, or serve the file "
                f"there: penstock reward serve {serve[0]} --register {url}"
            )
        return url
    if not serve and connections.answers(launch.REWARD_URL):
        return launch.REWARD_URL
    if missing := [str(file) for file in serve if not file.is_file()]:
        raise ConfigError(f"--serve {', '.join(missing)}: there is no such file")
    if not serve:
        print(
            f"penstock: no reward service answers at {launch.REWARD_URL}: starting one for this command",
            file=sys.stderr,
        )
    served = [word for file in serve for word in ("--serve", str(file))]
    command = launch.module("penstock", *without_serve(typed))
    launch.replace_process(launch.module("penstock.deploy.scoring", *served, *more, "--", *command))
    raise AssertionError("the process was not replaced")


def warn_of_new_service() -> None:
    """Say above a list of rewards that it is not that of a running service."""
    if not connections.answers(launch.REWARD_URL):
        print(
            f"no reward service answers at {launch.REWARD_URL}: these are the built-in rewards of a new one, without anybody's "
            "endpoints (--url names a running service)\n"
        )


def read_extra_info(text: str) -> dict[str, Any]:
    """Return a JSON object; raises ConfigError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise ConfigError(f"--extra-info: not valid JSON: {err}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--extra-info: expected a JSON object, got {type(value).__name__}")
    return value


def without_serve(typed: Sequence[str]) -> list[str]:
    """Return the words of a command without ``--serve FILE``."""
    kept: list[str] = []
    words = iter(typed)
    for word in words:
        if word == "--serve":
            next(words, None)
        elif not word.startswith("--serve="):
            kept.append(word)
    return kept


def print_list(url: str, token_file: Path | None, *, as_json: bool) -> int:
    """Print every reward that tasks may name; return the exit code."""
    answer = RewardService(url, token_file).call("GET", "/v1/rewards")
    if as_json:
        print(json.dumps(answer))
        return 0
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("reward", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    table.add_column("description", overflow="fold")
    for row in answer["rewards"]:
        table.add_row(*(Text(printable(row[key])) for key in ("name", "kind", "description")))
    console().print(table)
    print("\nnext: penstock reward test NAME")
    return 0


def score_texts(
    name: str,
    completions: Sequence[str],
    url: str,
    token_file: Path | None,
    *,
    prompt: str,
    ground_truth: str,
    data_source: str,
    extra_info: Mapping[str, Any],
) -> int:
    """Score completions with a reward and print one line each; return 1 when the reward could not score."""
    texts = list(completions or _EXAMPLE)
    group = {
        "prompt": prompt,
        "completions": texts,
        "ground_truth": ground_truth,
        "data_source": data_source,
        "extra_info": extra_info,
    }
    answer = RewardService(url, token_file).call("POST", "/v1/score", {"reward": name, "groups": [group]})
    result = answer["results"][0]
    if result["error"] is not None:
        kind = "would be dead-lettered" if result["error"]["permanent"] else "would wait and be retried"
        error = f"{result['error']['reason']}: {result['error']['detail']}"
        print(f"penstock: {name} could not score: {printable(error)}; in a run the group {kind}", file=sys.stderr)
        return 1
    print(f"scored by {result['scorer']}, ground truth {ground_truth!r}")
    for text, score in zip(texts, result["scores"], strict=True):
        parts = "".join(f"  {part}={value:g}" for part, value in score["parts"].items())
        print(f"{score['score']:8.3f}  {text!r}{parts}")
    return 0


def set_service(name: str, verb: str, url: str, token_file: Path | None) -> int:
    """Drain or resume an endpoint; return the exit code."""
    live = RewardService(url, token_file).call("POST", f"/v1/endpoints/{name}/{verb}")["live"]
    running = live["under_way"] + sum(live["finishing"].values())
    print(f"{name}: {live['state']}; {running} groups in running calls, as this replica sees it")
    return 0


def remove(name: str, url: str, token_file: Path | None) -> int:
    """Unregister an endpoint; return the exit code."""
    RewardService(url, token_file).call("DELETE", f"/v1/endpoints/{name}")
    print(f"{name} is no longer registered; groups that need it wait until it is registered again")
    return 0


def _detail(response: httpx.Response) -> str:
    try:
        detail = response.json()["detail"]
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}"
    return printable(detail) if isinstance(detail, str) else json.dumps(detail)
