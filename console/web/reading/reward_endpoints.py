"""The rewards of a run's reward service, through its HTTP API: endpoints with latency and breaker, and a test call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.console import connections, launch
from penstock.console.tools.rewards import RewardService, RewardServiceError
from penstock.protocol.files import read_regular

PORT_FILE = "reward.port"  # in the folder of a local run, see `deploy/local_run.py`
_LIST_S = 3.0
_TEST_S = 20.0


def service_url(folder: Path, url: str | None) -> str:
    """Return the URL of a run's reward service: the one that was set, that of the local run, else the default one."""
    if url is not None:
        return url
    try:
        return f"http://127.0.0.1:{int(read_regular(folder / PORT_FILE))}"
    except (OSError, ValueError):
        return launch.REWARD_URL


def endpoints(url: str, token_file: Path | None) -> dict[str, Any]:
    """Return the rewards and endpoints of a reward service; ``problem`` says why there are none."""
    if not connections.may_answer(url):
        return {"url": url, "rewards": [], "endpoints": [], "problem": f"no reward service answers at {url}"}
    service = RewardService(url, token_file, answer_s=_LIST_S)
    try:
        listed = service.call("GET", "/v1/rewards")["rewards"]
        registered = service.call("GET", "/v1/endpoints")
    except (RewardServiceError, KeyError, TypeError) as err:
        return {"url": url, "rewards": [], "endpoints": [], "problem": str(err)}
    return {"url": url, "rewards": listed[:500], "endpoints": registered[:200], "problem": ""}


def score(url: str, token_file: Path | None, body: dict[str, Any]) -> Any:
    """Score one group by hand. Raises RewardServiceError."""
    return RewardService(url, token_file, answer_s=_TEST_S).call("POST", "/v1/score", body)
