"""What a session stores as its settings is what it was given: commands read it back. Only secrets of declared fields and of environments are left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.console.connections import NamedRun
from penstock.console.tools import trust
from penstock.deploy import scoring
from penstock.deploy.config_show import as_document
from penstock.deploy.evaluation import target
from penstock.protocol import seals
from penstock.protocol.config.run_file import config_document, load
from penstock.protocol.errors import ConfigError
from penstock.protocol.secret_values import MASK
from penstock.trainer.recovery.resume_checks import changed_settings, read_settings
from penstock.trainer.settings import TrainerSettings

TEXTS = [
    r"token=(\d+)", "Use search(query, api_key=None). Write token=ID pairs; the answer is signature=(a, b).", "password=hunter2", "Authorization: Bearer abcdefg1",
    "https://user:pw1@host/x?key=abc", "sk-Zq9xW2kL7pT4vB8nRt5y", "jinaai/jina-reranker-v2-base-multilingual", "<|im_end|>", f"a line of {MASK}", "--token abc", "10:30:00.123@worker-3",
]  # fmt: skip
KEYS = [  # one text or list of every section that holds texts
    "data.system_prompt", "data.map.prompt", "data.roles.bot", "data.template_arguments.stop_token", "rollout.stop", "reward.define.r.parts.p.parameters.pattern",
    "reward.define.r.parts.p.parameters.stop_token", "reward.define.r.parts.p.parameters.headers", "reward.define.r.parts.p.parameters.password",
    "environment.define.e.system_prompt", "environment.define.e.options.note", "environment.define.e.options.stop_token",
]  # fmt: skip


def loaded(*more: str, **options: Any) -> Any:
    return load(TrainerSettings, overrides=["model.path=m", "data.train=d", *more], **options)


def given(key: str, text: str) -> list[str]:
    value = json.dumps([text] if key == "rollout.stop" else text)
    return ["reward.define.r.parts.p.reward=format", "environment.define.e.type=tools", f"{key}={value}"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("key", KEYS)
def test_a_text_is_stored_as_it_is(key: str, text: str, tmp_path: Path) -> None:
    document = json.loads(json.dumps(config_document(loaded(*given(key, text)))))
    value: Any = document["settings"]
    for part in key.split("."):
        value = value[part]
    assert value == ([text] if key == "rollout.stop" else text)
    settings, _ = read_settings(json.dumps(document).encode(), where="here")
    assert config_document(loaded())["settings"].keys() == document["settings"].keys()
    assert list(settings.rollout.stop) == (value if key == "rollout.stop" else [])
    seals.write(tmp_path / "config.json", json.dumps(document))
    assert scoring._recorded_rewards(tmp_path / "config.json") == document["settings"]["reward"]
    recorded = target.recorded_settings(
        target.Target("r", tmp_path, "x", recorded=tmp_path / "config.json"), with_reward=True
    )
    (tmp_path / "recorded.toml").write_text(recorded)
    again = loaded(files=[tmp_path / "recorded.toml"])
    for section in ("reward", "data"):
        assert config_document(again)["settings"][section] == document["settings"][section]


def test_secrets_of_environments_are_not_stored_and_their_changes_are_noticed(tmp_path: Path) -> None:
    options = "environment.define.e.options"
    documents = [
        config_document(loaded("environment.define.e.type=tools", f"{options}.variables={{FOO={json.dumps(value)}}}", f"{options}.env=['A={value}']", f"{options}.auth.x={json.dumps(value)}"))
        for value in ("one", "two")
    ]  # fmt: skip
    for document, value in zip(documents, ("one", "two"), strict=True):
        assert f'"{value}"' not in json.dumps(document)
        assert f"A={value}" not in json.dumps(document)
    (tmp_path / "config.json").write_text(json.dumps(documents[0]))
    changed = changed_settings(tmp_path / "config.json", json.dumps(documents[1]).encode())
    assert sorted(changed) == [
        f"{options}.{key} = {MASK}, was another value" for key in ("auth.x", "env", "variables.FOO")
    ]
    assert changed_settings(tmp_path / "config.json", json.dumps(documents[0]).encode()) == []
    before = config_document(loaded('data.system_prompt="write token=A"'))
    (tmp_path / "config.json").write_text(json.dumps(before))
    now = json.dumps(config_document(loaded('data.system_prompt="write token=B"'))).encode()
    assert changed_settings(tmp_path / "config.json", now) == [
        'data.system_prompt = "write token=B", was "write token=A"'
    ]


def test_settings_that_were_stored_masked_are_refused_where_they_are_used(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    whole = config_document(
        loaded(
            *given("x", "y")[:2], 'data.system_prompt="token=A"', "reward.define.r.parts.p.parameters.pattern='token=A'"
        )
    )
    document = json.loads(json.dumps(whole).replace("token=A", f"token={MASK}"))
    seals.write(path, json.dumps(document))
    run = target.Target("r", tmp_path, "x", recorded=path)
    with pytest.raises(
        ConfigError, match=r"reward\.define\.r\.parts\.p\.parameters\.pattern was stored with .* give the run file"
    ):
        scoring._recorded_rewards(path)
    with pytest.raises(ConfigError, match=r"data\.system_prompt was stored with"):
        target.recorded_settings(run, with_reward=True)
    with pytest.raises(ConfigError, match=r"here: data\.system_prompt was stored with"):
        read_settings(json.dumps(document).encode(), where="here")
    file = tmp_path / "run.toml"
    file.write_text('[data]\nsystem_prompt = "token=A"\n')
    assert "system_prompt" in target.recorded_settings(run, with_reward=False, files=[file])
    secret = config_document(loaded(environ={"PENSTOCK_NATS__PASSWORD": "hunter2"}))
    assert secret["settings"]["nats"]["password"] == MASK
    read_settings(json.dumps(secret).encode(), where="here")


def test_config_show_hides_what_is_stored() -> None:
    shown = json.dumps(as_document([loaded('data.system_prompt="password=hunter2"')]))
    assert "hunter2" not in shown


def test_trust_shows_what_a_folder_calls_a_default_and_every_variable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "gift"
    folder.mkdir()
    defaults = config_document(loaded())["settings"]
    settings = {**defaults, "run": {"id": "gift"}, "algorithm": {**defaults["algorithm"], "loss": "evil.py:loss"}}
    (folder / "config.json").write_text(
        json.dumps({"settings": settings, "origins": dict.fromkeys(["algorithm.loss", "run.id"], "default")})
    )
    (folder / "run.toml").write_text(
        '[environment.define.x.options.env]\nPYTHONPATH = "/evil"\nLD_PRELOAD = "/e.so"\n[reward]\nsecret = "evil.py:f"\n[nats]\npassword = "hunter2"\n'
        '[environment.define.x.options]\ncommand = ["sh", "--token", "evil.sh"]\n'
    )
    assert trust.trust(NamedRun("gift", [f"run.dir={tmp_path}"]), yes=False, defaults=defaults) == 1
    shown = capsys.readouterr().out
    for text in (
        "algorithm.loss = evil.py:loss",
        "PYTHONPATH = /evil",
        "LD_PRELOAD = /e.so",
        "secret = evil.py:f",
        "evil.sh",
    ):
        assert text in shown
    assert "hunter2" not in shown
    assert "trainer.steps" not in shown
    assert trust.trust(NamedRun("gift", [f"run.dir={tmp_path}"]), yes=False) == 1
    assert "trainer.steps" in capsys.readouterr().out
