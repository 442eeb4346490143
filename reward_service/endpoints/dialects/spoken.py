"""The dialects by name."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from pydantic import JsonValue

from penstock.reward_service.endpoints.dialects.dialect import Dialect
from penstock.reward_service.endpoints.dialects.nemo_gym import NemoGymDialect
from penstock.reward_service.endpoints.dialects.openai_grader import OpenAiGraderDialect
from penstock.reward_service.endpoints.dialects.openrlhf import OpenRlhfDialect
from penstock.reward_service.endpoints.dialects.penstock import PenstockDialect
from penstock.reward_service.endpoints.dialects.slime import SlimeDialect
from penstock.reward_service.endpoints.dialects.trl import TrlDialect
from penstock.reward_service.endpoints.dialects.verl import VerlBatchDialect, VerlDialect


class DialectName(StrEnum):
    """The request and response format of an endpoint."""

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
