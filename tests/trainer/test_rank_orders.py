"""Orders of rank 0: other ranks run marked methods with checked arguments, and rank 0 learns which of them failed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from tests.servers import wait_for

from penstock.trainer.errors import CheckpointError, PublicationFailed
from penstock.trainer.rank_orders import (
    LeaderOnly,
    RankOrders,
    RankProgram,
    on_all_ranks,
    order,
    pack_order,
    read_order,
)


@dataclass(frozen=True)
class Piece:
    numbers: tuple[float, ...]
    name: str | None = None


class Ranks:
    num_ranks = 2

    def __init__(self, sent: list[Any], *, is_leader: bool) -> None:
        self._sent, self._is_leader = sent, is_leader

    def broadcast(self, data: Any) -> Any:
        if not self._is_leader:
            return self._sent.pop(0)
        self._sent.append(data)
        return data


class Counting(RankProgram):
    num_steps_done = 3

    def __init__(self, ranks: Any) -> None:
        super().__init__(ranks)
        self.calls: list[Any] = []

    @on_all_ranks
    def add(self, piece: Piece, known: LeaderOnly[Iterable[object]] = (), *, folder: Path | None = None) -> int:
        self.calls.append((piece, list(known), folder, self.activity.phase))
        return len(self.calls)

    def quietly(self) -> None:
        self.calls.append("not an order")


def test_all_ranks_make_the_calls_of_rank_0() -> None:
    """In its order, with equal arguments but those that stay there; paths are absolute, infinite numbers are kept."""
    sent: list[Any] = []
    leader, other = Counting(Ranks(sent, is_leader=True)), Counting(Ranks(sent, is_leader=False))
    pieces = Piece((0.1 + 0.2, float("inf"), -0.0), "one"), Piece(())
    assert leader.add(pieces[0], [object()]) == 1
    assert leader.add(pieces[1], folder=Path("/data/x")) == 2
    leader.dismiss()
    other.follow()
    assert other.calls == [(pieces[0], [], None, "add"), (pieces[1], [], Path("/data/x"), "add")]
    assert [call[0] for call in leader.calls] == [*pieces]
    assert other.activity.phase == "waiting for rank 0"
    assert str(other.calls[0][0].numbers[2]) == "-0.0"
    method, arguments = read_order(Counting, pack_order(Counting.add, Piece(()), folder=Path("x")))
    assert (method.__name__, arguments["folder"]) == ("add", Path.cwd() / "x")


@pytest.mark.parametrize("name", ["quietly", "follow", "__init__", "missing"])
def test_only_marked_methods_are_orders(name: str) -> None:
    """Whatever else an order names is refused on the rank that reads it."""
    data = msgpack.packb([name, {}])
    assert data is not None
    with pytest.raises(ValueError, match=f"rank 0 ordered '{name}', which is no order of Counting"):
        read_order(Counting, data)


@pytest.mark.parametrize("value", [b'{"numbers": ["1.0"]}', b'{"numbers": 1.0}', b"[]", b"{"])
def test_arguments_of_other_types_are_refused(value: bytes) -> None:
    data = msgpack.packb(["add", {"piece": value}])
    assert data is not None
    with pytest.raises(ValueError, match="validation error"):
        read_order(Counting, data)


class Store:
    """An object of each rank whose orders threads carry out."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    @order
    def double(self, piece: Piece) -> Piece:
        if self._error is not None:
            raise self._error
        return Piece(tuple(2 * number for number in piece.numbers))


class Together:
    """Three ranks in this process, of which rank 0 asks the others over a channel."""

    num_ranks = 3

    def __init__(self, *others: Store) -> None:
        self._answers: list[Callable[[bytes], bytes]] = []
        self.is_leader = False
        for rank, other in enumerate(others, start=1):
            RankOrders(other, self, "store", OSError)  # type: ignore[arg-type]
            wait_for(lambda: len(self._answers) == rank, f"the thread of rank {rank}")  # noqa: B023  called here
        self.is_leader = True

    def channel(self) -> Any:
        return SimpleNamespace(listen=self._answers.append, ask=self._ask)

    def _ask(self, question: bytes, own: Callable[[], Any]) -> tuple[Any, list[bytes]]:
        return own(), [answer(question) for answer in self._answers]


def test_rank_0_has_the_results_of_all_ranks() -> None:
    piece = Piece((1.5, 2.0))
    found = RankOrders(Store(), Together(Store(), Store()), "store", OSError).ask(Store.double, piece)  # type: ignore[arg-type]
    assert found == [Piece((3.0, 4.0))] * 3
    assert RankOrders(Store(), None, "store", OSError).ask(Store.double, piece) == found[:1]


def test_every_rank_that_fails_is_named_with_its_reason() -> None:
    """As the given error; an error of rank 0 itself is raised as it is."""
    ranks: Any = Together(Store(KeyError("w")), Store(CheckpointError("no state was copied")))
    with pytest.raises(PublicationFailed, match="rank 1: KeyError: 'w'; rank 2: no state was copied"):
        RankOrders(Store(), ranks, "store", PublicationFailed).ask(Store.double, Piece(()))
    with pytest.raises(KeyError, match="mine"):
        RankOrders(Store(KeyError("mine")), ranks, "store", PublicationFailed).ask(Store.double, Piece(()))
