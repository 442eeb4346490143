"""The mutations of `make fuzz-ring`: reproducible, and of the kind that their names say."""

from __future__ import annotations

import random

import pytest

from penstock.protocol.errors import WireError
from penstock.protocol.facts import Fact, GroupGenerated, GroupScored, TaskIssued, decode, encode
from tests.groups import make_generated, make_groups, make_scored
from tests.rigs.fuzz import mutate_facts


@pytest.mark.parametrize("make", [make_generated, lambda run, groups: make_scored(make_generated(run, groups))])
def test_lies_are_mostly_valid_messages_and_damage_is_mostly_not(make) -> None:
    """Lies pass the schema, so that they reach what is behind it; damaged fields and bytes end in a WireError."""
    fact = make("r", make_groups(2, size=2))
    message, valid = encode(fact), {"lies": 0, "fields": 0, "bytes": 0}
    for seed in range(200):
        rng = random.Random(seed)
        for name, data in (
            ("lies", mutate_facts.lies_of(rng, message, message)[1]),
            ("fields", mutate_facts.fields_of(rng, message)[1]),
            ("bytes", mutate_facts.bytes_of(rng, message, message)[1]),
        ):
            try:
                decode(data, type(fact))
            except WireError:
                continue
            valid[name] += 1
    assert valid["lies"] > 100
    assert valid["fields"] < 60
    assert valid["bytes"] < 100


def test_every_fact_can_be_drawn_from_its_model() -> None:
    """Messages drawn from the annotations of each model carry its tag; some of each of the ring's facts are valid."""
    valid = dict.fromkeys((TaskIssued, GroupGenerated, GroupScored), 0)
    for model in {*Fact.registry.values(), *valid}:
        for seed in range(300 if model in valid else 60):
            data = mutate_facts.generated_fact(random.Random(seed), model)
            if model in valid:
                try:
                    decode(data, model)
                except WireError:
                    continue
                valid[model] += 1
    assert valid[GroupGenerated] > 0
