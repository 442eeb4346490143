"""Schemathesis sends what the API's own description allows, and what it does not: no answer is an internal error.

`make fuzz` draws new requests each time; a failure names the seed that draws the same ones again:

    PENSTOCK_TEST_EXAMPLES=10 PENSTOCK_TEST_SEED=123 python -m pytest tests/console/web/control/test_schema.py
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from starlette.testclient import TestClient
from tests.console.web.control.api import BASE, Api, FakeLauncher
from tests.console.web.control.api import settings as least
from tests.examples import FACTOR

if TYPE_CHECKING:
    import schemathesis

_EXAMPLES = 3  # for each route and mode
# The runs of this test have no servers: an answer that names the one that is missing is right.
_UNREACHABLE = re.compile(r"no reward service answers at |NATS of run \S+ does not answer at ")


@pytest.mark.slow
def test_no_request_that_the_description_allows_or_forbids_is_an_internal_error(
    api: Api, launcher: FakeLauncher, tmp_path: Path
):
    """Every route but the endless stream, with values that fit and values that do not; runs exist, so that paths lead somewhere."""
    import schemathesis
    from schemathesis.core.result import Ok
    from schemathesis.generation import GenerationMode

    client = api.client()
    for run in ("a", "0"):
        assert client.post("/v1/runs", json={"run": run, "settings": least()}).status_code == 201
    schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
    sent = 0
    number = int(os.environ.get("PENSTOCK_TEST_SEED", secrets.randbits(32))) if FACTOR > 1 else 0
    for result in schema.get_all_operations():
        assert isinstance(result, Ok), result
        operation = result.ok()
        if operation.path.endswith("/events"):
            continue

        for mode in GenerationMode:
            cases = operation.as_strategy(generation_mode=mode)

            @seed(number)
            @settings(
                max_examples=_EXAMPLES * FACTOR, deadline=None, database=None, phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            @given(case=cases)
            def ask(case: schemathesis.Case) -> None:
                nonlocal sent
                sent += 1
                _check(client, case, f"PENSTOCK_TEST_SEED={number}")

            with contextlib.suppress(Unsatisfiable):  # nothing to get wrong: a route without parameters
                ask()
    assert sent > 20


def _check(client: TestClient, case: schemathesis.Case, drawn_by: str) -> None:
    request = case.as_transport_kwargs(base_url=BASE)
    body = request.get("json")
    content = json.dumps(body).encode() if body is not None else request.get("data")
    answer = client.request(
        request["method"],
        request["url"],
        params=request.get("params"),
        content=content if isinstance(content, (bytes, str)) else None,
        headers={"content-type": "application/json"},
    )
    is_unreachable = answer.status_code == 503 and _UNREACHABLE.match(answer.json()["detail"])
    assert answer.status_code < 500 or is_unreachable, (drawn_by, request, answer.text)
    if answer.status_code >= 400:
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["detail"]
