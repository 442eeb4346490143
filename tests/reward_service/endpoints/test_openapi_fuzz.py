"""Schemathesis sends requests that the OpenAPI description allows and ones that it forbids."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.examples import FACTOR
from tests.reward_service.conftest import replica_of

from penstock.deploy.processes.servers import NatsServer
from penstock.protocol.config.connection import S3Settings

TOKEN = "0123456789abcdef0123"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,ignored_auth"


@pytest.mark.slow
def test_nothing_that_the_description_allows_or_forbids_breaks_the_api(
    own_nats: Callable[[], NatsServer], s3_settings: S3Settings, tmp_path: Path, run_id: str
) -> None:
    """No request gets a 500, responses match the description, and no route answers without a token."""
    tokens = tmp_path / "tokens"
    tokens.write_text(f"boss admin {TOKEN}\n")
    given = (f"reward_service.tokens_file={tokens}", "reward_service.math_workers=1")
    with replica_of(run_id, own_nats().settings, s3_settings, tmp_path, *given) as service:
        description = tmp_path / "openapi.json"  # a busy machine may answer later than Schemathesis waits for it
        description.write_text(json.dumps(service.get("/openapi.json")))
        done = subprocess.run(
            [
                str(Path(sys.executable).with_name("st")), "run", str(description), "--url", service.url,
                "--phases", "examples,coverage,fuzzing", "--max-examples", str(2 * FACTOR), "--checks", CHECKS,
                "-H", f"Authorization: Bearer {TOKEN}", "--request-timeout", "60", "--suppress-health-check", "all",
                *(["--generation-deterministic"] if FACTOR == 1 else []), "--warnings", "off", "--no-color",
            ],
            cwd=tmp_path, capture_output=True, text=True, timeout=220 * FACTOR, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert service.alive()
        assert "Traceback" not in service.output
