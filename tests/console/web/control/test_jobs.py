"""Runs created, queued, paused and removed through the API; its state is the files, so a second console goes on with it."""

from __future__ import annotations

import json
import os
import threading
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.console.web.control.api import Api, FakeLauncher, settings

from penstock.console.web.access import Role
from penstock.console.web.jobs import actions, job_file, queue
from penstock.console.web.jobs.job_file import Job, Launch, decide
from penstock.console.web.launchers.launcher import Found
from penstock.console.web.launchers.run_process import LAUNCH
from penstock.console.web.problems import Problem
from penstock.protocol import seals
from penstock.protocol.record import run_folder


def create(api: Api, run: str, **more: Any) -> dict[str, Any]:
    answer = api.client(Role.RUN).post("/v1/runs", json={"run": run, "settings": settings(), **more})
    assert answer.status_code == 201, answer.text
    return answer.json()


def state(api: Api, run: str) -> str:
    return api.client(Role.READ).get(f"/v1/runs/{run}").json()["state"]


def post(api: Api, run: str, verb: str, expected: int = 200) -> dict[str, Any]:
    answer = api.client(Role.RUN).post(f"/v1/runs/{run}/{verb}")
    assert answer.status_code == expected, answer.text
    return answer.json()


def test_a_run_file_is_checked_by_the_code_that_trains(api: Api):
    """In a process of its own; a wrong key is named with its line and the right one, and nothing is created."""
    text = '[model]\npath = "m"\n[data]\ntrain = "d.jsonl"\n[trainer]\nstpes = 5\nsteps = "5"\n'
    refused = api.client().post("/v1/runs", json={"run": "one", "run_file": text})
    assert refused.status_code == 422
    assert refused.json()["errors"] == [
        "run.toml:6: unknown key trainer.stpes; did you mean trainer.steps?",
        'run.toml:7: trainer.steps: expected a valid integer, got "5"',
    ]
    assert not [one for one in api.folder.iterdir() if one.is_dir()]


def test_settings_come_back_with_their_origins(api: Api, launcher: FakeLauncher):
    """Before the first start those that were checked; from then on those the trainer was started with."""
    answer = create(api, "one", settings=settings(trainer={"lr": 1e-6}, tracker=[{"type": "tensorboard"}]))
    assert (answer["run"], answer["uuid"], answer["state"]) == ("one", "one", "created")
    planned = api.client(Role.READ).get("/v1/runs/one/config").json()
    assert planned["source"] == "planned"
    assert planned["settings"]["trainer"]["lr"] == 1e-6
    assert planned["origins"]["trainer.lr"].startswith("run.toml:")
    assert planned["origins"]["trainer.steps"] == "default"
    started = {"settings": {"trainer": {"lr": 2e-6}}, "origins": {}}
    (api.folder / "one" / "config.json").write_text(json.dumps(started))
    assert api.client(Role.READ).get("/v1/runs/one/config").json() == {"run": "one", "source": "started", **started}


def test_the_guide_s_job_fields_become_settings(api: Api, launcher: FakeLauncher, tmp_path: Path):
    job = {
        "name": "Qwen7b GRPO math", "description": "on GSM8K", "model_path": "Qwen/Qwen2.5-7B-Instruct", "model_size": "7B",
        "algorithm": "grpo", "train_data_path": str(tmp_path / "train.parquet"), "eval_data_path": "/data/test.parquet",
        "num_gpus": 8, "learning_rate": 1e-6, "batch_size": 1024, "num_epochs": 15, "context_length": 1536, "rollout_n": 5,
        "kl_coef": 0.001,
    }  # fmt: skip
    answer = api.client().post("/v1/runs", json=job)
    assert answer.status_code == 201, answer.text
    assert answer.json()["uuid"] == "qwen7b-grpo-math"
    folder = api.folder / "qwen7b-grpo-math"
    assert tomllib.loads((folder / "run.toml").read_text()) == {
        "model": {"path": "Qwen/Qwen2.5-7B-Instruct"},
        "data": {"train": str(tmp_path / "train.parquet"), "eval": "/data/test.parquet", "max_prompt_tokens": 512},
        "trainer": {"lr": 1e-6, "epochs": 15},
        "rollout": {"groups_per_step": 1024, "group_size": 5, "max_new_tokens": 1024},
        "algorithm": {"kl_coefficient": 0.001, "name": "grpo"},
    }
    stored = job_file.read(folder)
    assert stored is not None
    assert (stored.num_gpus, stored.description) == (8, "7B on GSM8K")


def test_job_fields_of_given_answers_become_keys_of_their_section(api: Api, launcher: FakeLauncher, tmp_path: Path):
    """The guide's example with another algorithm; the command is the one that a person types, without the console's overrides."""
    job = {
        "name": "Warm up", "model_path": "/m", "algorithm": "dpo", "train_data_path": "/d.jsonl", "eval_data_path": "/e.jsonl",
        "learning_rate": 1e-6, "batch_size": 8, "num_epochs": 2,
    }  # fmt: skip
    console = Api(api.folder, "nats.url=nats://127.0.0.1:9")
    answer = console.client().post("/v1/runs", json={**job, "start": True})
    assert answer.status_code == 201, answer.text
    folder = api.folder / "warm-up"
    assert tomllib.loads((folder / "run.toml").read_text()) == {
        "model": {"path": "/m"},
        "dpo": {"data": "/d.jsonl", "eval_data": "/e.jsonl", "lr": 1e-6, "batch_size": 8, "epochs": 2.0},
    }
    (started,) = launcher.started
    assert started.command[2:] == (
        "-m", "penstock.fine_tuning", "dpo", str(folder / "run.toml"), "run.id=warm-up", f"run.dir={api.folder}",
    )  # fmt: skip
    two = {**job, "name": "Two", "settings": {"trainer": {"num_ranks": 2}}}
    assert console.client().post("/v1/runs", json=two).is_success
    assert api.client().post("/v1/runs/two/start").json()["state"] == "queued"
    launcher.end(folder, 0)
    assert state(api, "warm-up") == "stopped"  # no result yet: it was asked to pause by hand
    (folder / "dpo-training").mkdir()
    (folder / "dpo-training" / "result.json").write_text("{}")
    assert state(api, "warm-up") == "finished"
    assert queue.advance(console.context) == 1
    assert launcher.started[1].command[2:4] == ("-m", "torch.distributed.run")
    assert "create another run" in post(api, "warm-up", "start", 409)["fix"]
    assert api.client().delete("/v1/runs/warm-up").status_code == 204
    assert not folder.exists()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "the request has no settings"),
        ({"run": "a", "run_file": "x = 1", "model_path": "m"}, "run_file comes with model_path"),
        ({"run": "a", "run_file": "[model"}, "run_file is not valid TOML"),
        ({"run": "A b", "settings": settings()}, "such as a-b"),
        ({"settings": settings()}, "the run has no name"),
        ({"run": "a", "settings": settings(model=5)}, "model is a section, not a value"),
        ({"run": "a", "settings": settings(trainer={"lr": "\ud800"})}, "no UTF-8"),
        ({"run": "a", "settings": settings(), "unknown": 1}, "body.unknown: Extra inputs"),
        ({"run": "a", "context_length": 9, "settings": settings(rollout={"max_new_tokens": "\ud800"})}, "context_length leaves"),
        ({"run": "a", "settings": settings(), "workers": -1}, "body.workers"),
        ({"run": "a", "settings": settings(), "workers": 0, "serve": ["r.py"]}, "serve comes with workers = 0"),
        ({"run": "a", "settings": settings(), "launcher": "ray"}, "body.launcher"),
        ({"run": "a", "settings": settings(), "launcher_options": {"x": 1}}, "launcher_options.x"),
        ({"run": "a", "settings": settings(), "serve": ["a\x00b"]}, "body.serve.0"),
        ({"run": "a", "algorithm": "sft", "command": "dpo", "settings": settings()}, "command = dpo comes with algorithm = sft"),
        ({"run": "a", "algorithm": "grpo", "command": "rm", "settings": settings()}, "command = rm comes with algorithm = grpo"),
        ({"run": "a", "command": "ppo", "settings": settings()}, "body.command"),
        ({"run": "a", "command": "sft", "workers": 3, "settings": settings()}, "workers comes with sft"),
        ({"run": "a", "command": "sft", "serve": ["r.py"], "settings": settings()}, "serve comes with sft"),
        ({"run": "a", "command": "rm", "context_length": 300, "settings": settings()}, "context_length comes with rm"),
        ({"run": "a", "command": "sft", "settings": settings(sft={"steps": 3}, trainer={"lr": 0.1})}, "trainer.lr is not read by penstock sft"),
        ({"run": "a", "command": "sft", "rollout_n": 3, "settings": settings()}, "rollout_n comes with sft"),
        ({"run": "a", "algorithm": "DPO", "kl_coef": 0.1, "settings": settings()}, "leave kl_coef out: dpo.beta"),
        ({"run": "a", "command": "sft", "settings": settings(sft={"stepz": 3})}, "did you mean sft.steps?"),
        ({"run": "a", "command": "sft", "settings": settings(rollout={"group_size": 4})}, "is not read by `penstock sft`; remove it"),
        ({"run": "a", "command": "dpo", "num_epochs": 1, "settings": settings(dpo={"steps": 3})}, "the request has steps and epochs"),
        ({"run": "a", "num_epochs": 1, "settings": settings(trainer={"steps": 3})}, "the request has steps and epochs"),
        ({"run": "a", "context_length": 9, "settings": settings(rollout={"max_new_tokens": 9})}, "context_length leaves nothing"),
        ({"run": "a", "learning_rate": 2}, "body.learning_rate"),
    ],
)  # fmt: skip
def test_a_request_that_cannot_be_a_run_is_refused_with_the_reason(
    api: Api, launcher: FakeLauncher, body: dict[str, Any], said: str
):
    answer = api.client().post("/v1/runs", content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == 422, answer.text
    assert said in answer.text
    assert not [one for one in api.folder.iterdir() if one.is_dir()]


def test_settings_nested_without_end_are_refused(api: Api, launcher: FakeLauncher):
    deep = '{"run":"a","settings":{"model":' + '{"a":' * 700 + "1" + "}" * 700 + "}}"
    answer = api.client().post("/v1/runs", content=deep, headers={"content-type": "application/json"})
    assert answer.status_code in {400, 422}, answer.text


def test_of_many_requests_for_one_name_one_creates_the_run(api: Api, launcher: FakeLauncher):
    body = {"run": "one", "settings": settings()}
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: api.client().post("/v1/runs", json=body), range(6)))
    assert sorted(answer.status_code for answer in answers) == [201, 409, 409, 409, 409, 409]
    assert sorted(one.name for one in api.folder.iterdir() if one.is_dir()) == ["one"]
    assert state(api, "one") == "created"


def test_runs_of_this_machine_wait_for_one_another_in_their_order(api: Api, launcher: FakeLauncher):
    """The order is that of the starts, also for a console that was killed and started anew; one runs at a time."""
    for run in ("c", "b", "a"):
        create(api, run, start=True)
    assert [state(api, run) for run in ("c", "b", "a")] == ["running", "queued", "queued"]
    status = api.client(Role.READ).get("/v1/runs/a").json()
    assert status["position"] == 1
    restarted = Api(api.folder)
    assert queue.advance(restarted.context) == 0
    for ended, then in (("c", "b"), ("b", "a")):
        launcher.end(api.folder / ended, 0)
        assert queue.advance(restarted.context) == 1
        assert state(restarted, then) == "running"
    assert [start.run for start in launcher.started] == ["c", "b", "a"]


def test_a_run_has_its_workers_here_or_elsewhere(api: Api, launcher: FakeLauncher):
    """With workers it is started like `penstock train --local`, without any the trainer alone."""
    create(api, "here", workers=3, serve=["r.py"], start=True)
    launcher.end(api.folder / "here", 0)
    create(api, "elsewhere", workers=0, start=True)
    here, elsewhere = (start.command for start in launcher.started)
    own = (str(api.folder / "here" / "run.toml"), "run.id=here", f"run.dir={api.folder}")
    options = ("--local", "--workers", "3", "--serve", str(Path.cwd() / "r.py"))
    assert here[3:] == ("penstock", "train", *own, *options)
    assert elsewhere[3:5] == ("penstock", "train")
    assert "--workers" not in elsewhere


def test_a_run_that_was_started_by_hand_uses_the_machine_too(api: Api, launcher: FakeLauncher):
    with run_folder.hold_lock(api.folder / "by-hand"):
        assert create(api, "one", start=True)["state"] == "queued"
        assert state(api, "by-hand") == "running"
    queue.advance(api.context)
    assert state(api, "one") == "running"


def test_the_queue_advances_while_the_server_runs(api: Api, launcher: FakeLauncher):
    create(api, "a", start=True)
    create(api, "b", start=True)
    launcher.end(api.folder / "a", 0)
    with api.client():  # starts the app, and stops it
        pass
    assert [start.run for start in launcher.started] == ["a", "b"]


def test_a_start_that_fails_is_shown_and_holds_up_no_other(api: Api, launcher: FakeLauncher):
    """The reason is the state's detail; another start tries again."""
    launcher.fails = True
    create(api, "a", start=True)
    status = api.client().get("/v1/runs/a").json()
    assert (status["state"], status["detail"]) == ("failed", "not started: sbatch failed. no partition. set one")
    launcher.fails = False
    create(api, "b", start=True)
    assert state(api, "b") == "running"
    launcher.end(api.folder / "b", 0)
    assert post(api, "a", "start")["state"] == "running"


def test_a_damaged_job_is_reported_and_stops_nothing(api: Api, launcher: FakeLauncher):
    create(api, "a")
    seals.write(api.folder / "a" / job_file.JOB, '{"run": ')
    answer = api.client().get("/v1/runs/a")
    assert answer.status_code == 422
    assert "job.json cannot be read" in answer.text
    assert create(api, "b", start=True)["state"] == "running"
    assert {one["run"] for one in api.client().get("/v1/runs").json()} == {"a", "b"}


def test_a_file_that_a_job_names_as_its_launcher_is_not_run(api: Api, launcher: FakeLauncher, tmp_path: Path):
    """A folder that was copied here may claim to be a running one; an installed launcher alone has a name."""
    create(api, "a")
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    job = api.folder / "a" / job_file.JOB
    stored = {**json.loads(job.read_text()), "launcher": f"{tmp_path / 'evil.py'}:L", "starts": 1, "intent": "run"}
    seals.write(job, json.dumps(stored))
    (api.folder / "a" / LAUNCH).write_text('{"start": 1}')
    assert state(api, "a") == "running"
    assert "is not installed here" in json.dumps(post(api, "a", "stop", 409))
    post(api, "a", "start")
    assert not (tmp_path / "ran").exists()


def test_pause_asks_the_trainer_and_resume_starts_the_next_session(api: Api, launcher: FakeLauncher):
    """Pausing is written into the run's folder; a resume withdraws it before the process starts. Repeating changes nothing."""
    create(api, "a", start=True)
    folder = api.folder / "a"
    assert post(api, "a", "pause")["state"] == post(api, "a", "pause")["state"] == "pausing"
    assert run_folder.is_pause_requested(folder)
    assert post(api, "a", "resume", 409)["got"] == "state pausing"
    launcher.end(folder, 0)
    assert state(api, "a") == post(api, "a", "pause")["state"] == "paused"
    assert post(api, "a", "resume")["state"] == post(api, "a", "start")["state"] == "running"
    assert not run_folder.is_pause_requested(folder)
    assert [start.number for start in launcher.started] == [1, 2]


def test_a_pause_that_was_only_half_written_is_repeated(api: Api, launcher: FakeLauncher):
    """An API that is killed between the job and the request leaves a run that is asked by the next one, until it has ended."""
    create(api, "a", start=True)
    post(api, "a", "pause")

    def is_asked_again() -> bool:
        run_folder.withdraw_pause(api.folder / "a")
        queue.repeat_pauses(api.folder)
        return run_folder.is_pause_requested(api.folder / "a")

    assert is_asked_again()
    process = launcher.running.pop("a")
    os.close(process)  # its process is on another machine, and holds no lock that is seen here
    assert is_asked_again()
    launcher.running["a"] = os.open(api.folder / "a", os.O_RDONLY)
    launcher.end(api.folder / "a", 0)
    assert not is_asked_again()


def test_stop_ends_a_running_run_and_takes_a_queued_one_out(api: Api, launcher: FakeLauncher):
    """Stopping twice sends one signal, and with force another."""
    create(api, "a", start=True)
    create(api, "b", start=True)
    assert post(api, "b", "stop")["state"] == "created"
    assert queue.queued(api.folder) == []
    assert post(api, "a", "stop")["state"] == post(api, "a", "stop")["state"] == "stopping"
    post(api, "a", "stop?force=true")
    assert launcher.stopped == [("a", False), ("a", True)]
    launcher.end(api.folder / "a", 130)
    assert state(api, "a") == post(api, "a", "stop")["state"] == "stopped"


@pytest.mark.parametrize("verb", ["start", "pause", "resume", "stop"])
def test_a_run_of_another_command_is_not_controlled(api: Api, verb: str):
    (api.folder / "a").mkdir()
    (api.folder / "a" / "metrics.jsonl").touch()
    assert post(api, "a", verb, 409)["detail"] == "run a was not created by this API"
    answer = api.client().get("/v1/runs/a/config")
    assert (answer.status_code, answer.json()["detail"]) == (404, "run a has no stored settings")


def test_the_folder_of_runs_has_a_bounded_number_of_entries(
    api: Api, launcher: FakeLauncher, monkeypatch: pytest.MonkeyPatch
):
    create(api, "a")
    monkeypatch.setattr(actions, "_MAX_RUNS", 1)
    answer = api.client().post("/v1/runs", json={"run": "b", "settings": settings()})
    assert (answer.status_code, answer.json()["fix"]) == (429, "remove runs that ended")
    assert not (api.folder / "b").exists()


def test_a_lock_that_another_request_holds_or_that_is_gone_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """No request waits without end, and none makes a folder anew that was removed meanwhile."""
    monkeypatch.setattr(job_file, "_LOCK_S", 0.05)
    refused: list[str] = []

    def second() -> None:
        try:
            with job_file.locked(tmp_path / "lock", "run a"):
                pass
        except Problem as problem:
            refused.append(str(problem))

    with job_file.locked(tmp_path / "lock", "run a"):
        waiting = threading.Thread(target=second)
        waiting.start()
        waiting.join(60.0)
        is_waiting = waiting.is_alive()
    waiting.join()
    assert not is_waiting, "it waits for as long as the first one holds the lock"
    assert ["another request changes run a" in text for text in refused] == [True]
    with pytest.raises(Problem, match="run a was removed meanwhile"), job_file.locked(tmp_path / "a" / "lock", "run a"):
        pass
    assert not (tmp_path / "a").exists()


def test_checks_of_settings_are_few_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each is a process: one more than allowed is refused, and one that takes too long is ended."""
    monkeypatch.setattr(actions, "_CHECK_S", 0.02)
    with pytest.raises(Problem, match="were not checked within"):
        actions.check([], {}, tmp_path, tmp_path, command="train")
    monkeypatch.setattr(actions, "_at_a_time", threading.BoundedSemaphore(1))
    with actions._at_a_time, pytest.raises(Problem, match="many requests check settings now"):
        actions.check([], {}, tmp_path, tmp_path, command="train")


def test_wrong_states_are_refused_with_what_to_do(api: Api, launcher: FakeLauncher):
    """A created run cannot be paused, a finished one not started, a running one not removed."""
    create(api, "a")
    assert post(api, "a", "pause", 409)["got"] == "state created"
    post(api, "a", "start")
    refused = api.client().delete("/v1/runs/a")
    assert (refused.status_code, refused.json()["fix"]) == (409, "POST /v1/runs/a/stop first")
    launcher.end(api.folder / "a", 0)
    (api.folder / "a" / "trainer.json").write_text('{"complete": true, "steps": 5}')
    assert post(api, "a", "start", 409)["got"] == "state finished"


def test_a_created_run_is_removed_with_its_folder(api: Api, launcher: FakeLauncher):
    create(api, "a")
    assert api.client(Role.ADMIN).delete("/v1/runs/a").status_code == 204
    assert not (api.folder / "a").exists()
    create(api, "a")


STATES: list[tuple[str, dict[str, Any], dict[str, Any] | None, str]] = [  # state, job, launch, process or "finished"
    ("created", {"intent": "none", "starts": 0}, None, "absent"),
    ("queued", {"intent": "run"}, None, "absent"),
    ("queued", {"intent": "run", "starts": 2}, {"exit_code": 0}, "absent"),
    ("waiting", {"intent": "run", "handle_start": 1}, None, "waiting"),
    ("running", {"intent": "run"}, {}, "running"),
    ("pausing", {"intent": "pause"}, {}, "running"),
    ("stopping", {"intent": "stop"}, {}, "running"),
    ("paused", {"intent": "pause"}, {"exit_code": 0}, "absent"),
    ("failed", {"intent": "pause"}, {"exit_code": 2}, "absent"),
    ("stopped", {"intent": "stop"}, {"exit_code": 130}, "absent"),
    ("stopped", {"intent": "stop"}, {}, "absent"),
    ("stopped", {"intent": "run"}, {"exit_code": 143}, "absent"),
    ("failed", {"intent": "run"}, {"exit_code": 2}, "absent"),
    ("failed", {"intent": "run"}, {}, "absent"),
    ("failed", {"intent": "run", "error": "x"}, None, "absent"),
    ("finished", {"intent": "run"}, {"exit_code": 0}, "finished"),
    ("finished", {"intent": "pause"}, {"exit_code": 0}, "finished"),
    ("queued", {"intent": "run", "starts": 2}, {"exit_code": 0}, "finished"),
]


@pytest.mark.parametrize(("expected", "job", "launch", "process"), STATES)
def test_the_state_follows_from_the_files_and_the_launcher(
    expected: str, job: dict[str, Any], launch: dict[str, Any] | None, process: str
):
    asked = Job(run="a", created_at=0.0, **{"starts": 1, **job})
    made = None if launch is None else Launch(start=1, **launch)
    found = Found("absent" if process == "finished" else process)  # type: ignore[arg-type]
    assert decide(asked, made, found, is_finished=process == "finished").state == expected
