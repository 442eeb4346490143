"""Ids that would leave their folder, match other subjects or fill a log are refused where they are read."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from penstock.protocol.errors import ConfigError
from penstock.protocol.groups import Identifier
from penstock.protocol.subjects import check_run_id
from penstock.reward_service.settings import RewardServiceSection
from penstock.rollout_service.settings import WorkerSettings

HOSTILE = (
    "", "../x", "/etc", "a/b", "a\\b", "*", ">", "a*", "a b", "a\t", "a\n", "\n", "\0", "a\0b", "\x1b[2J", "é",
    "a\u202eb", "x" * 10_000, "a,b", "$JS", "{}", "%2e%2e",
)  # fmt: skip
TOKENS = (".", "..", "a.b", "a.", ".a", "a:b", "a#b")  # one token of a subject has no dot; a folder's name has no colon


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: repr(value[:20]))
def test_an_id_in_a_message_is_plain(value: str) -> None:
    """It has neither separators of paths nor wildcards nor control characters, and at most 200 characters."""
    with pytest.raises(ValidationError):
        TypeAdapter(Identifier).validate_python(value)


@pytest.mark.parametrize("value", HOSTILE + TOKENS, ids=lambda value: repr(value[:20]))
def test_an_id_that_names_a_folder_or_a_subject_is_one_token(value: str) -> None:
    """The ids of a worker, a replica of the reward service and a run stand in subjects, keys and paths."""
    for section in (WorkerSettings, RewardServiceSection):
        section.model_validate({"id": "worker-0"})
        with pytest.raises(ValidationError):
            section.model_validate({"id": value})
    with pytest.raises(ConfigError):
        check_run_id(value)
