"""Secrets that were planted in every table of settings are nowhere in what leaves a process; what is none stays readable."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import structlog

from penstock.console.registry.exchange import _given
from penstock.console.tracking.consumer import hide as tracker_hide
from penstock.console.tracking.trackers import refuse_credentials
from penstock.console.web.jobs import actions
from penstock.protocol import logs, process_end, secret_values
from penstock.protocol.config.connection import NatsSettings
from penstock.protocol.config.run_file import config_document, format_config, load
from penstock.protocol.errors import ConfigError
from penstock.protocol.secret_values import MASK, hide, resolved, scrub
from penstock.rollout_service.settings import RolloutSettings
from penstock.trainer.settings import TrainerSettings

BODY = "Zx9Qw8Er7Ty6Ui5Op4As3Df2Gh1Jk0"
CAPITALS = "QZXW4567ABCD2345EFGH"
FORMS = [  # joined here, so that no scanner of secrets takes this file for a leak
    "sk-" + BODY, "sk-proj-" + BODY, "sk-ant-api03-" + BODY, "sk_live_" + BODY, "rk_test_" + BODY, "ghp_" + BODY, "gho_" + BODY,
    "ghs_" + BODY, "github_pat_" + BODY, "glpat-" + BODY, "AKIA" + CAPITALS[:16], "ASIA" + CAPITALS[:16], "hf_" + BODY, "xoxb-1-" + BODY,
    "xoxp-1-" + BODY, "xapp-1-" + BODY, f"eyJhbGciOi.{BODY}.{BODY}", "AIza" + BODY + "12345", "ya29." + BODY, "GOCSPX-" + BODY,
    f"SG.{BODY}.{BODY}", "npm_" + BODY, "pypi-" + BODY, "dckr_pat_" + BODY, "nvapi-" + BODY, "gsk_" + BODY, "r8_" + BODY, "xai-" + BODY,
    "pplx-" + BODY, "tvly-" + BODY, "dop_v1_" + BODY, "hvs." + BODY, "lsv2_pt_" + BODY, "SUA" + CAPITALS * 3, "SK" + "0a" * 16,
    "AGE-SECRET-KEY-1" + CAPITALS, f"12345678:AA{BODY}{BODY}", f"-----BEGIN RSA PRIVATE KEY-----\n{BODY}\n-----END RSA PRIVATE KEY-----",
    f"-----BEGIN OPENSSH PRIVATE KEY-----\n{BODY}", f"postgres://user:{BODY}@db/x", f"https://{BODY}@host/x", f"me:{BODY}@host", f"https://h/?x=1&token={BODY}",
    f"https://h/o?X-Amz-Signature={BODY}", f"Authorization: Bearer {BODY}", f"Authorization: Basic {BODY}", f"curl -H 'X-Api-Key: {BODY}'",
    f"OPENAI_API_KEY={BODY} agent", f"MY_TOKEN={BODY} agent", f"agent --password={BODY}", f"Server=x;Password={BODY};User=y",
    f"AccountName=x;AccountKey={BODY}==", f'{{"api_key": "{BODY}"}}', f"{{'db_password': '{BODY}'}}", f'password="{BODY}"', f"X-Vault-Token: {BODY}",
    f"HF_TOKEN: {BODY}", f"secret_key = {BODY}", f"os.environ['OPENAI_API_KEY'] = '{BODY}'", f'CONNECT {{"user":"u","pass":"{BODY}"}}', f"https://hooks.slack.com/services/T0/B0/{BODY}", f"https://discord.com/api/webhooks/1/{BODY}",
]  # fmt: skip
SHORT = "AWerzxT6zH"
IN_TEXTS = [
    "password: {}", "password = {}", "db_password: {}", "Passphrase: {}.", "jwt={}", "client_secret: {}", r'{{"a": "{{\"password\": \"{}\"}}"}}',
    r'\\"api_key\\": \\"{}\\"', "<password>{}</password>", "<wsse:Password>{}</wsse:Password>", "machine h login me password {}", "curl -u me:{} https://h",
    "curl -s --user 'me:{}' h", "sshpass -p {} ssh h", "docker login -u me -p {} registry", "podman login h -p '{}'", "mysql -u root -p{} db",
]  # fmt: skip
OF_TEXTS = [
    "password: required", "the password: see docs", "docker run -p 8080:80 image", "key: runs/r1/groups/e0.p17.a0", "secret: none", "token: 17",
    "step 4: 17 groups", "password = secrets.token_hex2(8)", "<p>4 of 5</p>", "curl -u is a flag", "password_file: secrets/n1", "max_tokens: 2048", "<tokens>2048</tokens>", "mkdir -p runs/a1b2c3",
]  # fmt: skip
PREFIXES = [
    "ATATT", "PMAK-", "sntrys_", "sntryu_", "rubygems_", "pscale_tkn_", "tskey-auth-", "shpss_", "dp.st.", "dp_st_", "phc_", "NRAK-", "nfp_", "sq0atp-",
    "lin_oauth_", "secret_", "dor_v1_", "vercel_blob_rw_", "HRKU-", "pul-",
]  # fmt: skip
NAMES = [
    "password", "PASSWORD", "db_password", "passwd", "pwd", "passphrase", "secret", "client_secret", "clientSecret", "SECRET_KEY",
    "aws_secret_access_key", "token", "TOKEN", "api_token", "accessToken", "refresh-token", "api_key", "apikey", "apiKey", "API-KEY",
    "OPENAI_KEY", "private_key", "signing_key", "encryption_key", "license_key", "credentials", "bearer", "authorization", "auth",
    "cookie", "DSN", "GITHUB_PAT",
]  # fmt: skip
PLAIN = "hunter two"
HARMLESS: list[tuple[str, Any]] = [
    ("password_file", "secrets/nats"), ("token_file", "/run/secrets/t"), ("token_url", "https://login.example/x"), ("max_tokens", 7),
    ("stop_token", "<|im_end|>"), ("eos_token", "</s>"), ("pad_token", "[PAD]"), ("answer_key", "answer"), ("sort_key", "score"),
    ("path", "Qwen/Qwen3-0.6B"), ("path", "models/sk-learn"), ("revision", "0123456789abcdef0123456789abcdef01234567"), ("name", "task-specific-thing"),
    ("url", "https://example.com:8443/v1?x=1"), ("endpoint", "nats://a:1,nats://b:2"), ("loss", "my_loss.py:loss"), ("tokens", "all"),
    ("description", "a token, a key and a secret word"), ("api_key", "env:OPENAI_API_KEY"), ("authors", "me"), ("pattern", r"\d+(?P<key>x)"),
]  # fmt: skip


def planted(secret: str) -> list[str]:
    text = json.dumps(secret)
    return [
        "model.path=m", "data.train=d", "environment.define.e.type=x", f"environment.define.e.options.variables={{FOO={text}}}",
        f"environment.define.e.options.servers.web={{command=['agent', {text}], variables={{X={text}}}}}",
        f"environment.define.e.options.deep=[{{note={text}}}]", f"environment.define.e.system_prompt={text}",
        "reward.define.r.parts.p.reward=format", f"data.template_arguments.note={text}", f"data.system_prompt={text}", f"data.map.prompt={text}",
        f"data.roles.bot={text}", f"reward.define.r.parts.p.parameters.note={text}",
    ]  # fmt: skip


def of_a_program(secret: str) -> list[str]:
    text, options = json.dumps(secret), "environment.define.e.options"
    return [
        "environment.define.e.type=program",
        f"{options}.command=['agent', {text}]",
        f"{options}.variables={{FOO={text}, X={text}}}",
    ]


def shown(loaded: Any) -> str:
    stored = config_document(loaded)
    document = {**stored, "settings": hide((), stored["settings"])}
    card = "\n".join(_given(document["settings"], {**document["origins"]}))
    return "\n".join([format_config(loaded), json.dumps(document), card, repr(loaded), str(loaded.settings)])


@pytest.mark.parametrize("secret", FORMS)
def test_a_known_form_is_shown_nowhere(secret: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = re.findall(r"[A-Za-z0-9]{16,}", secret)[-1]
    for service, overrides in ((TrainerSettings, planted(secret)), (RolloutSettings, of_a_program(secret))):
        assert part not in shown(load(service, overrides=overrides, environ={}))
    (tmp_path / "config.json").write_text(
        json.dumps({"settings": {"x": {"y": [secret]}}, "origins": {}})
    )  # of an earlier release
    assert part not in json.dumps(actions.config(tmp_path))
    with pytest.raises(ConfigError) as refused:
        load(TrainerSettings, overrides=[f"trainer.lr={json.dumps(secret)}", "model.path=m", "data.train=d"])
    assert part not in str(refused.value)
    logs.configure("test")
    log = structlog.get_logger("test")
    text = f"called with {secret}"
    log.warning(text, url=secret, more={"a": [secret]})
    try:
        raise ValueError(f"refused {secret}")
    except ValueError as err:
        log.exception("failed")
        process_end._report("test", ValueError, err, err.__traceback__)
    written = capsys.readouterr().err
    assert "called with" in written
    assert part not in written


def test_secrets_in_texts_are_hidden_and_what_is_none_stays() -> None:
    texts = [*(text.format(SHORT) for text in IN_TEXTS), *(f"called with {prefix}{BODY} here" for prefix in PREFIXES)]
    assert [text for text in texts if SHORT in scrub(text) or BODY in scrub(text)] == []
    assert [text for text in OF_TEXTS if scrub(text) != text] == []
    assert json.loads(scrub(IN_TEXTS[6].format(SHORT))) == {"a": f'{{"password": "{MASK}"}}'}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_says_that_a_value_is_secret(name: str) -> None:
    for path, value in (((name,), PLAIN), (("options",), {name: PLAIN}), (("a", "b"), [{name: PLAIN}])):
        assert PLAIN not in json.dumps(hide(path, value))
    overrides = [*planted("x")[:3], f'environment.define.e.options.tools.web.{name}="{PLAIN}"']
    loaded = load(TrainerSettings, overrides=overrides, environ={})
    assert PLAIN not in shown(loaded)
    with pytest.raises(ValueError, match="is a credential"):
        refuse_credentials({name: PLAIN})


@pytest.mark.parametrize("table", ["variables", "env", "headers", "extra_headers", "cookies"])
def test_every_value_of_a_table_of_variables_is_secret(table: str) -> None:
    assert hide(("options",), {table: {"MODE": PLAIN, "X_file": "f", "Y": "env:Y"}})[table] == {
        "MODE": MASK,
        "X_file": "f",
        "Y": "env:Y",
    }


@pytest.mark.parametrize(("name", "value"), HARMLESS)
def test_what_is_no_secret_stays_as_it_is(name: str, value: Any) -> None:
    assert hide(("section", name), value) == value
    assert not isinstance(value, str) or scrub(value) == value


def test_a_flag_and_what_follows_it() -> None:
    assert hide(("command",), ["agent", "--api-key", PLAIN, "-v", "x"]) == ["agent", "--api-key", MASK, "-v", "x"]


def test_options_name_files_and_variables_and_texts_do_not_repeat_what_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secret_values, "_known", set())
    (tmp_path / "key").write_text("from a file\n")
    options = {
        "variables": {"A_TOKEN": "env:A", "B_file": str(tmp_path / "key"), "C": "c"},
        "key_file": str(tmp_path / "key"),
        "steps": 3,
    }
    assert resolved(options, "options", {"A": "from the environment"}, ("key", "variables")) == {
        "variables": {"A_TOKEN": "from the environment", "B": "from a file", "C": "c"}, "key": "from a file", "steps": 3,
    }  # fmt: skip
    assert resolved({"token_file": "x"}, "options", {}, ("token", "token_file")) == {
        "token_file": "x"
    }  # a field that it reads itself
    assert scrub("it is from a file, not from the environment") == f"it is {MASK}, not {MASK}"
    for wrong, message in (
        ({"x": "env:NONE"}, "options.x = env:NONE: the variable NONE is not set"),
        ({"variables": {"A_file": "/none"}}, "options.variables.A_file = /none: not readable"),
        ({"key_file": "x", "key": "y"}, "key and key_file are both given"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolved(wrong, "options", {}, ("key",))
    (tmp_path / "nats").write_text("of the server")
    assert NatsSettings(password_file=tmp_path / "nats").secret() == "of the server"
    assert scrub("password of the server") == f"password {MASK}"
    assert (
        tracker_hide(("environment", "define"), {"e": {"options": {"variables": {"A": PLAIN}}}})["e"]["options"][
            "variables"
        ]["A"]
        == MASK
    )
