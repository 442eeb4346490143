"""The dialects by name."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from pydantic import JsonValue

from reward_service.dialects.dialect import Dialect
from reward_service.dialects.nemo_gym import NemoGymDialect
from reward_service.dialects.openai_grader import OpenAiGraderDialect
from reward_service.dialects.openrlhf import OpenRlhfDialect
from reward_service.dialects.penstock import PenstockDialect
from reward_service.dialects.slime import SlimeDialect
from reward_service.dialects.trl import TrlDialect
from reward_service.dialects.verl import VerlBatchDialect, VerlDialect


class DialectName(StrEnum):
    """How an endpoint wants to be asked."""

    PENSTOCK = "penstock"
    VERL = "verl"
    VERL_BATCH = "verl-batch"
    TRL = "trl"
    SLIME = "slime"
    OPENRLHF = "openrlhf"
    NEMO_GYM = "nemo-gym"
    OPENAI_GRADER = "openai-grader"


_DIALECTS: dict[DialectName, type[Dialect]] = {
    DialectName.PENSTOCK: PenstockDialect,
    DialectName.VERL: VerlDialect,
    DialectName.VERL_BATCH: VerlBatchDialect,
    DialectName.TRL: TrlDialect,
    DialectName.SLIME: SlimeDialect,
    DialectName.OPENRLHF: OpenRlhfDialect,
    DialectName.NEMO_GYM: NemoGymDialect,
    DialectName.OPENAI_GRADER: OpenAiGraderDialect,
}


def speak(name: DialectName, options: Mapping[str, JsonValue]) -> Dialect:
    """Return a dialect with its options; raises pydantic's ValidationError for options it does not know."""
    return _DIALECTS[name].model_validate(dict(options))
