"""`penstock settings`: any setting in words."""

from __future__ import annotations

import json

import pytest

from penstock.console.tools.explain_settings import find, print_settings
from penstock.protocol.errors import ConfigError


def shown(capsys: pytest.CaptureFixture[str], topic: str | None, *, as_json: bool = False) -> str:
    assert print_settings(topic, as_json=as_json) == 0
    return capsys.readouterr().out


def test_a_setting_is_explained_in_full(capsys: pytest.CaptureFixture[str]):
    """Type with unit, default, what is allowed, who reads it, other projects' names, and how to set it."""
    text = " ".join(shown(capsys, "rollout.max_new_tokens").split())
    for part in (
        *("Longest completion", "type whole number, in tokens", "default 256", "allowed at least 1", "read by trainer"),
        *("actor_rollout_ref.rollout.response_length", "[rollout] max_new_tokens = 256"),
        *("rollout.max_new_tokens=VALUE", "PENSTOCK_ROLLOUT__MAX_NEW_TOKENS=VALUE"),
    ):
        assert part in text
    assert "allowed one of float32, bfloat16" in " ".join(shown(capsys, "model.dtype").split())
    assert "presets 1.2 in async_grpo" in " ".join(shown(capsys, "algorithm.dual_clip").split())


def test_sections_are_listed_and_one_is_shown(capsys: pytest.CaptureFixture[str]):
    assert "reward_service" in shown(capsys, None)
    text = shown(capsys, "retention")
    assert "How long the parts of a run are kept." in text
    assert "retention.events_h" in text


def test_a_secret_is_not_offered_on_the_command_line(capsys: pytest.CaptureFixture[str]):
    text = shown(capsys, "nats.password")
    assert "nats.password=VALUE" not in text
    assert "PENSTOCK_NATS__PASSWORD=VALUE" in text


@pytest.mark.parametrize(
    ("topic", "keys"),
    [
        ("--rollout.max-staleness", {"rollout.max_staleness"}),
        ("[eval]", {"eval.every", "eval.samples"}),
        ("model.lora", {"model.lora.rank", "model.lora.alpha"}),
        ("actor_rollout_ref.actor.optim.lr", {"trainer.lr"}),
        ("beta", {"dpo.beta", "algorithm.kl_coefficient"}),
        ("staleness", {"rollout.max_staleness"}),
        ("weight decay", {"trainer.weight_decay"}),
        ("lr", {"trainer.lr", "sft.lr", "critic.lr"}),
    ],
)
def test_settings_are_found_by_many_names(topic: str, keys: set[str]):
    """A section, a table, a flag, another project's key, the last word, a word of keys or of descriptions."""
    assert keys <= {one.key for one in find(topic)}


@pytest.mark.parametrize(
    ("topic", "answer"),
    [
        ("trainer.stpes", "did you mean trainer.steps"),
        ("use_kl_loss", "is a key of another project: use algorithm.kl_coefficient"),
        ("qqq", "`penstock settings` lists the sections"),
    ],
)
def test_what_is_no_setting_is_answered(topic: str, answer: str):
    with pytest.raises(ConfigError, match=answer):
        find(topic)


def test_json_holds_every_setting(capsys: pytest.CaptureFixture[str]):
    document = json.loads(shown(capsys, None, as_json=True))
    assert len(document) > 250
    assert {one["key"]: one for one in document}["trainer.steps"]["default"] == "100"
