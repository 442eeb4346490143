"""What is hidden in texts and settings that are shown, and what stays readable."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any, get_args

import pytest

from penstock.protocol import secret_values
from penstock.protocol.config.connection import S3Settings
from penstock.protocol.config.run_file import load, values_of
from penstock.protocol.config.schema_keys import is_secret, locate
from penstock.protocol.secret_values import MASK, hide, remember, resolved, scrub
from penstock.trainer.settings import TrainerSettings

BODY = "Zq9xW2kL7pT4vB8nRt5y"
HEX = "0a1b2c3d4e5f60718293a4b5c6d7e8f901234567"
HARMLESS = [
    "jinaai/jina-embeddings-v2-base-en", "jinaai/jina-reranker-v2-base-multilingual", "together-ai-llama-3-70b-run", "xai-org-grok-1-checkpoint-1234",
    "/data/sk-experiments-2024/x", "sk-learn-models/foo", "sk-learn", "key-value-cache-2024-size-16", "fw-2024-01-01-experiment-name", "together_llama3_8b_instruct_v2",
    "key_metrics_2024_q1_final_x", "hf_Qwen3_checkpoint", "hf_Llama31_8B_Instruct", "pypi-package-mirror-2024-server", "npm_install_something_long", "gsk_8bit_quantized",
    "r8_quantized_model_123", "wandb_v1_run_2024_01_01_test_abc1", "hvs-house-voting-system-2024-x", "nvapi-gateway-2024-internal", "xoxb-test-channel", "sbp-qwerty-1234567890-abcd",
    "python:3.12@sha256:" + HEX, "docker.io/library/python:3.12-slim@sha256:" + HEX, "ghcr.io/x/y:v1@sha256:0123", "10:30:00.123@worker-3", "trainer:3@node-7",
    "ssh://git@github.com:org/repo", "git@github.com:org/repo.git", "https://user@host/path", "s3://bucket/key@v2", "run:v3@best", "step=3:loss@0.5", "row 3:x@y: bad",
    "error at 12:foo@bar", "nats://nats-1:4222,nats://nats-2:4222", "http://[::1]:8080/x@y", "bob@example.com", "pass@1=0.5",
    "eos_token=<|im_end|>", "pad_token=<pad>", "token=12", "token=A or token=B", "max_tokens=512", "MAX_PASS=3", "NUM_PASS=8", "BYPASS=1", "PRIMARY_KEY=id", "SORT_KEY=name",
    "PENSTOCK_MAX_TOKEN=5", "EOS_TOKEN=</s>", "api_key=None", "search(query, api_key=None)", "def f(x, token=None)", "tokenizer(text, token=True)", "api_key=os.environ['X']",
    "signature=(a, b)", "sig=0.5", "password=None", "PWD=/home/alice", "key=value", "Authorization: required", "authorization: none", "x-api-key: required for judges",
    "key=runs/demo/groups/000012/a1b2.parquet", "key: runs/x/weights/000001/manifest.json", 'columns "text_token", "chi2_token", "chi2_sequence"', '{"signature": "", "a": 1}',
    "api-key=missing", "the bearer of 2 bad news", "tokens/s=12", "sha256:" + HEX, "commit " + HEX, "create it with: penstock bootstrap", "set nats.password_file",
]  # fmt: skip
SHOWN_IN_PART = [  # a text with BODY or abc, which is hidden
    f"https://x/?key={BODY}", f"https://x/?a=1&code={BODY}", f"https://x/?exaApiKey={BODY}", "Server=x;Pwd=abc;User=y", "PGPASSWORD=abc psql", "postgres://user:p@abc@host/x",
    f"https://api.telegram.org/bot123456789:AA{BODY}{BODY}/send", f"e2b_{HEX}", f"ntn_{BODY}", f"lin_api_{BODY}", f"glsa_{BODY}_abcdef12", f"https://{BODY}@host/",
    "https://hooks.slack.com/workflows/T0/abc", "https://discordapp.com/api/webhooks/1/abc", f"agent --token {BODY}", "agent --token=abc", f"me:{BODY}@host",
    # in another pair, a text in a text (repr, JSON, a URL in a URL), a colour, an argv, a tuple, a block
    "url=https://h/x?api_key=abc1", "detail=password: abc123", "x=y=password=abc", f"a\\nsk-{HEX[:32]}", f"x%3Dghp_{BODY}", f"\\u0022ghp_{BODY}", f"\x1b[31mghp_{BODY}\x1b[0m",
    "a\\ntoken=abc12345", "https%3A%2F%2Fh%3Fa%26token%3Dabc12345", "password => abc123", "password -> abc123", "password=b'abc'", 'password = """abc"""',
    "('password', 'abc1')", "['mysql', '--password', 'abc1']", "password: >-\n  abc123", "X-Vault-Token: abc12345", "API Key: abc123", "Cookie: a=1; sid=abc", "Authorization: ApiKey abc1",
    f"Basic {BODY}", f"eyJhbGciOiJIUzI1NiJ9..{BODY}.{BODY}.x", f"pcsk_{BODY}", f"secret_x_{HEX[:32]}.{BODY}", f"postgres://u:a?b#{BODY}@h/x", "https://h/?pw=abc1",
    f"sk-{HEX[:32]}", f"see https://k:{BODY}@h:1/x", f"gsk_{BODY}{BODY}", f"csk-{HEX[:34]}", "docker run -e OPENAI_KEY=abc",
]  # fmt: skip
HIDDEN_SETTINGS: list[tuple[str, Any]] = [  # of an environment's options: abc and BODY are in none
    *((name, value) for name in ("headers", "env", "variables", "request_headers", "env_vars", "environment_variables", "extra_env", "http_headers", "environment")
      for value in ({"X-My": "abc"}, ["X-My: abc"], ["FOO=abc"], [["X-My", "abc"]], [{"name": "OPENAI", "value": "abc"}], "X-My: abc", {"X": ["abc"]}, {"X_file": f"{BODY}"})),
    *((name, value) for name in ("password", "secret", "credentials", "token", "auth", "api_key", "secrets")
      for value in ({"user": "a", "value": "abc"}, {"T": {"x": ["abc"]}}, ["abc"])),
    *((name, ["abc"]) for name in ("tokens", "api_keys", "passwords", "access_tokens")), ("keys", [BODY]), ("PGPASSWORD", "abc"), ("password", "$abc"), ("api_key", "#abc"),
    *(("args", value) for value in (["--key", BODY], ["--access-key", BODY], ["--pat", "abc"], ["--pwd", "abc"], ["--token", "abc"], ["--token=abc"], ["-u", "user:abc"],
                                    ["-H", "X-My: abc"], ["--header", "X-My: abc"], ["-e", "FOO=abc"], ["--db-password", "abc"])),
]  # fmt: skip
PLAIN_SETTINGS: list[tuple[str, Any]] = [
    ("credentials", "aws"), ("auth", "basic"), ("token", "auto"), ("stop_token", "###"), ("eos_token", "END"), ("stop_tokens", ["a", "b"]), ("special_tokens", {"a": "b"}),
    ("end_token", "x"), ("args", ["--max-token", "five", "--key", "name", "-u", "alice", "-v", "x"]), ("env", ["HOME", "PATH"]), ("headers", ["X-My: env:MY"]),
    ("environment", "math"), ("variables", {"MY_file": "secrets/my"}), ("schema", {"properties": {"headers": {"type": "object"}, "token": {"type": "string"}}}),
    ("define", {"secret": {"note": "x"}, "tokens": {"note": "x"}}), ("password", None), ("token", 7), ("auth", True), ("primary_key", "id"), ("token_type", "Bearer"),
]  # fmt: skip


@pytest.mark.parametrize("text", HARMLESS)
def test_a_harmless_text_stays(text: str) -> None:
    assert scrub(text) == text
    assert scrub(f"failed: {text}, see above") == f"failed: {text}, see above"
    assert hide(("options", "note"), [text]) == [text]


@pytest.mark.parametrize("text", SHOWN_IN_PART)
def test_a_credential_in_a_text_is_hidden(text: str) -> None:
    shown = scrub(text)
    assert MASK in shown
    assert not any(part in shown for part in ("abc", BODY, HEX[:20]))


@pytest.mark.parametrize(("name", "value"), HIDDEN_SETTINGS)
def test_tables_lists_and_children_of_secrets_are_hidden(name: str, value: Any) -> None:
    shown = json.dumps(hide(("environment", "define", "e", "options"), {name: value}))
    assert "abc" not in shown
    assert BODY not in shown


@pytest.mark.parametrize(("name", "value"), PLAIN_SETTINGS)
def test_choices_and_tokens_of_texts_stay(name: str, value: Any) -> None:
    assert hide(("environment", "define", "e", "options"), {name: value}) == {name: value}


def test_no_choice_and_no_default_of_a_setting_is_hidden() -> None:
    settings = load(TrainerSettings, overrides=["model.path=m", "data.train=d"], environ={}).settings
    for path, value in values_of(settings):
        shown = hide(path, value)
        assert shown == (list(value) if isinstance(value, tuple) else value) or is_secret(TrainerSettings, path), path
        for choice in get_args(locate(TrainerSettings, path)[1]):
            assert not isinstance(choice, str) or hide(path, choice) == choice, path


def test_ordinary_words_are_not_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(secret_values, "_known", set())
    (tmp_path / "name").write_text("Penstock7access")
    S3Settings(access_key="penstock", secret_key="penstock").keys()
    S3Settings(access_key_file=tmp_path / "name", secret_key="x7").keys()
    environ = {
        "HOME": "/home/alice",
        "MODEL": "Qwen3-0.6B",
        "MODE": "production",
        "URL": "http://search:8080",
        "OPENAI_KEY": "one two 3 four",
        "X": BODY,
    }
    resolved({"variables": {name: f"env:{name}" for name in environ}}, "environment.define.e.options", environ)
    for word in ("penstock", "password", "production", "/home/alice", "http://search:8080", "minioadmin", "short7"):
        remember(word)
    text = "penstock bootstrap: Penstock7access, /home/alice/x.py, Qwen3-0.6B, production, http://search:8080, password, minioadmin, short7"
    assert scrub(text) == text
    assert scrub(f"one two 3 four, {BODY}") == f"{MASK}, {MASK}"


def test_the_longest_secret_is_hidden_first_in_every_spelling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret_values, "_known", set())
    for value in ("abcdefgh1", "abcdefgh1SECRETTAIL", 'p@ss"w\\rd/1\n', "abcdefgh1SECRET"):
        remember(value)
    assert scrub("x abcdefgh1SECRETTAIL") == f"x {MASK}"
    secret = 'p@ss"w\\rd/1\n'
    for text in (json.dumps(secret), repr(secret), "nats://u:p%40ss%22w%5Crd%2F1%0A@h"):
        assert "ss" not in scrub(text).replace("nats", "")
    for user in ("u", "us", "use", "user"):
        encoded = base64.b64encode(f"{user}:abcdefgh1SECRETTAIL".encode()).decode()
        assert encoded[-12:-4] not in scrub(f"sent {encoded}")


@pytest.mark.parametrize(
    "piece",
    [
        "sk-",
        "a:",
        "://",
        "x=",
        "token=",
        "Bearer ",
        "Aa1",
        "--token ",
        "eyJ",
        "://a:b",
        "a@",
        "key_",
        "xai-a1-",
        "bot1",
        "'a1', ",
        "a: |\n",
        "cookie: a=",
        "\\n%3D",
    ],
)
def test_a_long_text_is_read_in_linear_time(piece: str) -> None:
    start = time.process_time()
    scrub(piece * (200_000 // len(piece)))
    assert time.process_time() - start < 8.0
