"""Call the HTTP API of a running reward service (`penstock reward list | test | drain | resume | remove`).

A data file has no completions. `penstock reward test NAME --data FILE` scores each row with answers of known quality: its right
answer in the usual formats, its recorded completion if it has one, another row's answer, and an empty one; a row of tests with
its solution, if it has one, and an empty program. A reward that gives all of them the same score gives no learning signal.
Rows whose tests accept an empty program, or refuse the row's solution, are named.
"""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from penstock.console import connections, launch
from penstock.console.terminal import one_line, print_table
from penstock.protocol.errors import ConfigError, PenstockError
from penstock.protocol.process_end import error_text
from penstock.protocol.transport import tls
from penstock.protocol.transport.tls import handshake_problem

if TYPE_CHECKING:
    import httpx


_CONNECT_S = 3.0
_ANSWER_S = 120.0  # an endpoint may be a slow judge
_EXAMPLE = ("4", "#### 4", "\\boxed{5}")
_ROWS_DEADLINE_S = 60.0
_ERRORS_SHOWN = 3
_TEST_MARKS = ("assert", "def test", "def check", "inputs", "test_list")


class RewardServiceError(PenstockError):
    """The reward service is unreachable, or refuses a request."""


class RewardService:
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
        import httpx  # noqa: PLC0415 # the page's console starts without it

        timeout = httpx.Timeout(self._answer_s, connect=_CONNECT_S)
        if self._tls is None:
            self._tls = tls.trust_own_authority(httpx.create_ssl_context())
        try:
            with httpx.Client(headers=self._headers, timeout=timeout, trust_env=False, verify=self._tls) as client:
                response = client.request(method, f"{self._url}{path}", json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as err:
            if problem := handshake_problem(err, self._url, tls.AUTHORITY):
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
    """Return the URL of the reward service: ``url`` if set, else the one of this machine.

    If none answers there, or files are to be served, the ``typed`` command is started again with a separate service,
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
            f"no reward service answers at {launch.REWARD_URL}: these are the built-in rewards of a new one, without registered "
            "endpoints (--url names a running service)\n"
        )


def read_extra_info(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise ConfigError(f"--extra-info: not valid JSON: {err}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--extra-info: expected a JSON object, got {type(value).__name__}")
    return value


def without_serve(typed: Sequence[str]) -> list[str]:
    kept: list[str] = []
    words = iter(typed)
    for word in words:
        if word == "--serve":
            next(words, None)
        elif not word.startswith("--serve="):
            kept.append(word)
    return kept


def print_list(url: str, token_file: Path | None, *, as_json: bool) -> int:
    answer = RewardService(url, token_file).call("GET", "/v1/rewards")
    if as_json:
        print(json.dumps(answer))
        return 0
    rows = [(reward["name"], reward["kind"], reward["description"]) for reward in answer["rewards"]]
    print_table(("reward", "kind", "description"), rows, wide=("description",))
    print("\nnext: penstock reward test NAME")
    return 0


def score_texts(
    name: str, completions: Sequence[str], url: str, token_file: Path | None, row: Mapping[str, Any]
) -> int:
    """Score completions of a row with a reward and print one line each; return 1 when the reward could not score."""
    texts = list(completions or _EXAMPLE)
    group = {**row, "completions": texts}
    answer = RewardService(url, token_file).call("POST", "/v1/score", {"reward": name, "groups": [group]})
    result = answer["results"][0]
    if result["error"] is not None:
        kind = "would be dead-lettered" if result["error"]["permanent"] else "would wait and be retried"
        error = f"{result['error']['reason']}: {result['error']['detail']}"
        print(f"penstock: {name} could not score: {one_line(error)}; in a run the group {kind}", file=sys.stderr)
        return 1
    print(f"scored by {result['scorer']}, ground truth {row['ground_truth']!r}")
    for text, score in zip(texts, result["scores"], strict=True):
        parts = "".join(f"  {part}={value:g}" for part, value in score["parts"].items())
        print(f"{score['score']:8.3f}  {text!r}{parts}")
    return 0


def set_service(name: str, verb: str, url: str, token_file: Path | None) -> int:
    live = RewardService(url, token_file).call("POST", f"/v1/endpoints/{name}/{verb}")["live"]
    running = live["under_way"] + sum(live["finishing"].values())
    print(f"{name}: {live['state']}; {running} groups in running calls, as this replica sees it")
    return 0


def remove(name: str, url: str, token_file: Path | None) -> int:
    RewardService(url, token_file).call("DELETE", f"/v1/endpoints/{name}")
    print(f"{name} is no longer registered; groups that need it wait until it is registered again")
    return 0


def _detail(response: httpx.Response) -> str:
    try:
        detail = response.json()["detail"]
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}"
    return one_line(detail) if isinstance(detail, str) else json.dumps(detail)


@dataclass(frozen=True, slots=True)
class RowSource:
    """Where rows come from: a data file with its columns, or what a run file trains on."""

    name: str
    arguments: tuple[str, ...]  # of the command that prints the rows

    @classmethod
    def of(cls, file: Path | None, run_file: Path | None, columns: Sequence[str]) -> RowSource:
        """Return the source of ``--data`` and ``--map``, or of ``--run-file``; raises ConfigError for both."""
        if file is not None and run_file is not None:
            raise ConfigError(f"--data {file} and --run-file {run_file}: leave one out; a run file names its data")
        if file is not None and file.suffix == ".toml":
            raise ConfigError(f"--data {file}: a run file, no data; type: --run-file {file}")
        if run_file is not None:
            if columns:
                raise ConfigError(f"--map {columns[0]}: a run file has its columns in [data.map]; change them there")
            return cls(str(run_file), ("--run-file", str(run_file)))
        return cls(str(file), (str(file), *(word for column in columns for word in ("--map", column))))


def try_data(name: str, source: RowSource, number: int, url: str, token_file: Path | None, *, as_json: bool) -> int:
    """Print the score distribution; return 1 when a row could not be scored, or all scores are equal.

    Raises ConfigError for a file that cannot be read, RewardServiceError when the service is unreachable or refuses.
    """
    service = RewardService(url, token_file)
    rows = _rows(source, number)
    checked = _check_tests(rows)
    tries = [
        _programs(checked[row["place"]]["solution"])
        if row["place"] in checked
        else _answers(row, rows[(at + 1) % len(rows)])
        for at, row in enumerate(rows)
    ]
    groups = [
        {
            "group_id": f"row-{at}",
            "completions": [text for _, text in answers],
            **{key: row[key] for key in ("prompt", "data_source", "ground_truth", "extra_info")},
        }
        for at, (row, answers) in enumerate(zip(rows, tries, strict=True))
    ]
    answer = service.call("POST", "/v1/score", {"reward": name, "groups": groups})
    by_kind: dict[str, list[float]] = {}
    for answers, result in zip(tries, answer["results"], strict=True):
        for (kind, _), score in zip(answers, result["scores"], strict=False):
            by_kind.setdefault(kind, []).append(score["score"])
    spread = answer["spread"]
    bad_tests = {place: check["problem"] for place, check in checked.items() if check["problem"]}
    if as_json:
        print(json.dumps({"reward": name, "spread": spread, "by_answer": by_kind, "bad_tests": bad_tests}))
    else:
        _print(name, rows, answer["results"], by_kind, spread)
        for place, problem in bad_tests.items():
            print(error_text(f"penstock: {place}: {problem}"), file=sys.stderr)
    for place, check in checked.items():
        if failed := check.get("failed"):
            print(f"penstock: {place}: its tests could not be run on this machine: {failed}", file=sys.stderr)
    return 1 if spread["warning"] or spread["num_errors"] or bad_tests else 0


def _rows(source: RowSource, number: int) -> list[dict[str, Any]]:
    """Read rows as a run would, in a child process."""
    command = launch.module(
        "penstock.deploy.data_check.commands", "data-rows", *source.arguments, "--number", str(number)
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=_ROWS_DEADLINE_S, check=False)
    if done.returncode:
        raise ConfigError(done.stderr.strip() or f"{source.name} could not be read")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    if not rows:
        raise ConfigError(f"{source.name} has no rows")
    return rows


def _check_tests(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Run the test programs of rows that have them, in the reward service's sandbox; return the results by place."""
    texts = "".join(json.dumps(row) + "\n" for row in rows)
    if not any(mark in texts for mark in _TEST_MARKS):
        return {}
    command = launch.module("penstock.reward_service", "check-tests")
    deadline_s = _ROWS_DEADLINE_S * (1 + len(rows))
    done = subprocess.run(command, input=texts, capture_output=True, text=True, timeout=deadline_s, check=False)
    if done.returncode:
        print(f"penstock: the rows' tests were not run: {done.stderr.strip()[-300:]}", file=sys.stderr)
    return {check["place"]: check for check in map(json.loads, done.stdout.splitlines())}


def _programs(solution: str | None) -> list[tuple[str, str]]:
    empty = ("an empty program", "```python\npass\n```")
    return [empty] if solution is None else [("its own solution", f"````python\n{solution}\n````"), empty]


def _answers(row: dict[str, Any], other: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (kind, answer) pairs, of the same kinds for every row that has a right answer."""
    answers = []
    if row["completion"] is not None:
        answers.append(("its own completion", row["completion"]))
    for whose, of in (("right", row), ("another row's", other)):
        truth = of["ground_truth"]
        if truth is not None and (of is row or truth != row["ground_truth"]):
            text = truth if isinstance(truth, str) else json.dumps(truth)
            answers += [
                (f"{whose} answer, plain", text),
                (f"{whose} answer after ####", f"#### {text}"),
                (f"{whose} answer in \\boxed", f"\\boxed{{{text}}}"),
            ]
    return [*answers, ("nothing", "")]


def _print(
    name: str,
    rows: Sequence[dict[str, Any]],
    results: Sequence[dict[str, Any]],
    by_kind: dict[str, list[float]],
    spread: dict[str, Any],
) -> None:
    numbers = ("number", "mean", "min", "max")
    distribution = [
        (kind, len(scores), *(f"{f(scores):.3f}" for f in (fmean, min, max))) for kind, scores in by_kind.items()
    ]
    print_table(("scored", *numbers), distribution, right=numbers)
    if spread["num_scores"]:
        print(
            f"\n{name} on {len(rows)} rows: {spread['num_scores']} scores, mean {spread['mean']:.3f}, standard deviation "
            f"{spread['std']:.3f}, {spread['num_distinct']} different values from {spread['min']:g} to {spread['max']:g}"
        )
    failed = [(row["place"], result["error"]) for row, result in zip(rows, results, strict=True) if result["error"]]
    for row_name, error in failed[:_ERRORS_SHOWN]:
        print(f"penstock: {row_name}: {error['reason']}: {error['detail']}", file=sys.stderr)
    if failed:
        print(f"penstock: {len(failed)} of {len(rows)} rows could not be scored", file=sys.stderr)
    if spread["warning"]:
        print(f"penstock: warning: {spread['warning']}", file=sys.stderr)
