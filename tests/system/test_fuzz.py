"""The mutations of `make fuzz-ring`: reproducible, and of the kind that their names say."""

from __future__ import annotations

import copy
import random

import pytest

from penstock.protocol.errors import PackError, WireError
from penstock.protocol.facts import Fact, GroupGenerated, GroupScored, TaskIssued, decode, encode
from penstock.protocol.packs import group_pack
from tests.groups import make_generated, make_groups, make_scored
from tests.rigs.fuzz import mutate_facts, mutate_packs


def test_a_seed_gives_the_same_mutations() -> None:
    """Every operation depends on its generator alone."""
    groups, other = make_groups(2, size=2), make_groups(2, size=3)
    message, spare = encode(make_generated("r", groups)), encode(make_generated("r", other))
    data, second = group_pack.encode(groups), group_pack.encode(other)
    for seed in range(40):
        first, again = (
            (
                mutate_facts.bytes_of(random.Random(seed), message, spare),
                mutate_facts.fields_of(random.Random(seed), message),
                mutate_facts.lies_of(random.Random(seed), message, spare),
                mutate_facts.generated_fact(random.Random(seed), GroupScored),
                mutate_packs.schema_of(random.Random(seed), data, second),
                mutate_packs.bytes_of(random.Random(seed), data, second),
            )
            for _ in range(2)
        )
        assert first == again


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


def test_changed_values_are_a_pack_of_the_right_schema() -> None:
    groups = make_groups(2, size=2)
    refused = 0
    valid = mutate_packs.read(group_pack.encode(groups))
    for seed in range(60):
        rows = copy.deepcopy(valid)
        name = mutate_packs.values_of(random.Random(seed), rows, valid)
        try:
            data = mutate_packs.write_rows(rows)
        except (ValueError, OverflowError):
            continue
        try:
            group_pack.decode(data)
        except PackError:
            refused += 1
        assert name
    assert 5 < refused < 55
