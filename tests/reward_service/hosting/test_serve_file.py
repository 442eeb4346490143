"""``python -m penstock.reward_service serve FILE.py`` as its user runs it."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.groups import make_group
from tests.reward_service.conftest import Wire
from tests.reward_service.processes import Serve, StartService
from tests.servers import secret_file, wait_for

from penstock.protocol.transport import tls


@pytest.mark.slow
def test_a_file_with_compute_score_scores_a_run(wire: Wire, start_service: StartService, serve: Serve) -> None:
    service = start_service("reward_service.endpoint_attempts=50")
    name = f"mine-{wire.run_id}"
    served = serve("serve", "examples/my_reward.py", "--name", name, "--register", service.url)
    assert served.url
    assert f"Next: penstock train run.toml reward.name={name}" in served.output
    wire.announce([make_group("g", size=2, texts=["1 2 3", "1 3 2"], reward_name=name)])
    scored = wire.wait_scored("g")["g"][0]
    assert scored.rewards == (1.0, 0.0)
    assert scored.parts["share_right"] == (1.0, pytest.approx(1 / 3))
    assert scored.scorer.startswith(f"{name}@")

    served.signal(signal.SIGTERM)
    assert served.wait() == 0, served.output
    assert name not in service.endpoints()


@pytest.mark.slow
def test_a_restarted_served_file_takes_over_its_name(wire: Wire, start_service: StartService, serve: Serve) -> None:
    """After SIGKILL of the served file its groups wait; started again, on another port, it scores them."""
    service = start_service("reward_service.endpoint_attempts=50")
    name = f"mine-{wire.run_id}"
    first = serve("serve", "examples/my_reward.py", "--name", name, "--register", service.url)
    assert first.url
    first.kill()
    wire.announce([make_group("g", size=1, texts=["1 2 3"], reward_name=name)])
    wire.wait_requeued()
    assert serve("serve", "examples/my_reward.py", "--name", name, "--register", service.url).url
    assert wire.wait_scored("g")["g"][0].rewards == (1.0,)
    assert not wire.dead


def test_user_code_runs_where_alarms_work_and_its_errors_name_the_line(tmp_path: Path, serve: Serve) -> None:
    """The function runs on the main thread, one score's exception is that score's error with file and line."""
    file = tmp_path / "alarming.py"
    file.write_text(
        "import signal\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    signal.signal(signal.SIGALRM, lambda *_: None)\n"
        "    return 1 / len(solution_str)\n"
    )
    url = serve("serve", str(file)).url
    body = {"reward": "alarming", "groups": [{"group_id": "g", "completions": ["ab", ""], "ground_truth": "x"}]}
    (result,) = httpx.post(url, json=body, timeout=60).raise_for_status().json()["results"]
    assert result["scores"][0]["score"] == 0.5
    assert result["scores"][1]["score"] is None
    assert "ZeroDivisionError" in result["scores"][1]["error"]
    assert "alarming.py, line 4, in compute_score" in result["scores"][1]["error"]


@pytest.mark.slow
def test_a_registration_that_is_refused_ends_the_command(
    wire: Wire, start_service: StartService, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong token, a built-in's name, no file, and no certificate end the command with one line, no traceback."""
    service = start_service(f"reward_service.token_file={secret_file('right')}")
    token = tmp_path / "token"
    token.write_text("wrong")
    example = "examples/my_reward.py"
    for variable in (tls.CERTIFICATE, tls.KEY):
        monkeypatch.setenv(variable, str(tmp_path / "absent"))
    refusals = {
        "no certificate with its key": serve("serve", example, "--host", "0.0.0.0", "--url", "https://x/score"),
        "401": serve("serve", example, "--register", service.url, "--token-file", str(token)),
        "letters, digits": serve("serve", example, "--name", "a b"),
        "no such file": serve("serve", "examples/absent.py"),
    }
    for text, process in refusals.items():
        assert process.wait() == 1
        assert text in process.output
        assert "Traceback" not in process.output
    token.write_text("right\n")
    named = serve("serve", example, "--name", "exact_match", "--register", service.url, "--token-file", str(token))
    assert named.wait() == 1
    assert "built-in" in named.output
    assert wire.run_id


def test_a_second_signal_exits_while_a_function_never_returns(tmp_path: Path, serve: Serve) -> None:
    """Two Ctrl-C end the process even during an endless loop of the user."""
    file, seen = tmp_path / "endless.py", tmp_path / "seen"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        f"    open({str(seen)!r}, 'w').close()\n"
        "    while True:\n        pass\n"
    )
    process = serve("serve", str(file))
    url = process.url
    body = {"reward": "endless", "groups": [{"completions": ["a"]}]}

    def interrupted() -> bool:
        process.signal(signal.SIGINT)
        return not process.alive()

    with ThreadPoolExecutor(1) as caller:
        answer = caller.submit(httpx.post, url, json=body, timeout=120)
        wait_for(seen.exists, "the function to start")
        wait_for(interrupted, "the process to end")
        assert isinstance(answer.exception(), httpx.TransportError)
