"""The rewards that a run can use: those offered by the reward service replicas that are alive.

Each replica renews its record in the registry bucket (`streams.registry_bucket`) under
``available.<replica>``. The trainer reads them at its start and refuses a reward name that is
not offered, which otherwise would show at a later step, by a dead letter.

    entries = registry.entries(aged=True).wait()
    offers = current_offers(entries, run_id=run_id)
    missing = names_not_offered({"gsm8k"}, offers)
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from pydantic import Field

from penstock.protocol.errors import WireError
from penstock.protocol.facts import Fact, decode
from penstock.protocol.groups import Finite, Identifier

if TYPE_CHECKING:
    from penstock.protocol.transport.key_value import Entry

PERIOD_S = 2.0  # a replica renews its record this often
CURRENT_S = 15.0  # an older record belongs to a replica that has exited
EXPIRED_S = 600.0  # an older record may be deleted by any replica
_KEY_PREFIX = "available."


class RewardsOffered(Fact):
    """Written by a reward service replica, read by the trainer: these reward names can be scored now.

    ``by_source`` maps a data set's name (``openai/gsm8k``) to its reward, which scores the rows whose
    reward name is ``auto``. ``definitions`` holds the digest of
    every reward that the replica's run file defines by parts (`reward_settings.RewardDefinition.digest`). ``success`` holds
    the least value of a correct completion, for rewards that have one.
    """

    schema_tag = "rewards_offered.v1"
    run_id: Identifier
    replica: Identifier
    at: Finite  # seconds since the epoch, by the replica's clock; for people
    names: tuple[str, ...]
    by_source: dict[str, str] = Field(default_factory=dict)
    definitions: dict[str, str] = Field(default_factory=dict)
    success: dict[str, Finite] = Field(default_factory=dict)


def key(replica: str) -> str:
    return f"{_KEY_PREFIX}{replica}"


def current_offers(entries: Iterable[Entry], *, run_id: str) -> list[RewardsOffered]:
    """Return the current records of this run's replicas; ``entries`` have their age by the server's clock.

    Records that do not decode are of another build and are ignored.
    """
    return [offer for entry, offer in _read(entries) if offer.run_id == run_id and entry.age_s <= CURRENT_S]


def expired_keys(entries: Iterable[Entry]) -> list[str]:
    """Return the keys of records that replicas left behind when they were killed; any replica may delete them."""
    return [entry.key for entry, _ in _read(entries) if entry.age_s > EXPIRED_S]


def _read(entries: Iterable[Entry]) -> Iterator[tuple[Entry, RewardsOffered]]:
    for entry in entries:
        if entry.key.startswith(_KEY_PREFIX):
            with contextlib.suppress(WireError):
                yield entry, decode(entry.value, RewardsOffered)


def names_not_offered(wanted: Iterable[str], offers: Iterable[RewardsOffered]) -> set[str]:
    return set(wanted).difference(*(offer.names for offer in offers))


def differently_defined(wanted: Mapping[str, str], offers: Iterable[RewardsOffered]) -> dict[str, list[str]]:
    """Return, by reward name, the replicas whose definition differs from ``wanted`` (digests by name)."""
    replicas: dict[str, list[str]] = {}
    for offer in offers:
        for name, digest in wanted.items():
            if offer.definitions.get(name, digest) != digest:
                replicas.setdefault(name, []).append(offer.replica)
    return replicas


def nearest(name: str, offers: Iterable[RewardsOffered]) -> list[str]:
    known = {known for offer in offers for known in (*offer.names, *offer.by_source)}
    return difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
