"""What a file that holds a row format needs: `RowFormat`, which says what the columns of a row mean; pure.

A user-defined format is named in the run file: ``data.format = "my_format.py:my_format"``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from penstock.protocol.extensions import Registry
from penstock.trainer.errors import MalformedData

if TYPE_CHECKING:
    from penstock.trainer.data.messages import Chat

ANSWERS: Final = ("response", "completion", "answer")  # columns that hold an answer in every format
_EVERYWHERE: Final = frozenset(
    {"prompt", "messages", "response", "completion", "question", "ground_truth", "data_source", "extra_info", "system"}
)


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """The columns of a row, each with what it means; all but `reads` go into ``extra_info``, for the reward.

    Every format may also have ground_truth, data_source, extra_info, system, images, and an answer to imitate in
    response, completion or answer.
    """

    name: str
    columns: str  # for the documentation
    trains: str = "both"  # GRPO, or both GRPO and SFT
    required: tuple[str, ...]
    unless: tuple[str, ...] = ()  # a row with one of these columns is in another format
    precedence: int = 100  # ``data.format = "auto"`` takes the matching format with the lowest
    prompt: str = "prompt"  # the column with a text or a chat
    is_whole_chat: bool = False  # of the column ``prompt``: its last message, if the assistant's, is the answer
    prompt_parts: tuple[str, ...] = ()  # further columns that ``extend`` reads
    extend: Callable[[dict[str, Any], Chat], Chat] | None = None  # adds what other columns of the row hold to the chat
    answer: str | None = None  # a further column with an answer to imitate
    calls: str | None = None  # such a column, if what it holds is a list of calls of tools
    ground_truth: str | None = None  # a column that is the ground truth where there is no column ground_truth
    data_source: str = "data_source"  # read where there is no column data_source

    def matches(self, row: dict[str, Any]) -> bool:
        return all(name in row for name in self.required) and not any(name in row for name in self.unless)

    @cached_property
    def reads(self) -> frozenset[str]:
        """The columns that ``extra_info`` leaves out."""
        columns = (self.prompt, *self.prompt_parts, self.answer, self.calls, self.ground_truth, self.data_source)
        return _EVERYWHERE.union(name for name in columns if name is not None)

    def answer_column(self, row: dict[str, Any]) -> str | None:
        """Return the column that SFT imitates in a row without messages; None if there is none."""
        return next((name for name in (*ANSWERS, self.answer, self.calls) if name is not None and name in row), None)


ROW_FORMATS: Final[Registry[RowFormat]] = Registry(
    "row format", RowFormat, package="penstock.trainer.data.row_formats", group="penstock.row_formats"
)


def detect(row: dict[str, Any]) -> RowFormat:
    """Return the built-in format of a row, by its columns; raises MalformedData, whose text leaves the fix to the caller."""
    by_precedence = sorted(ROW_FORMATS.built_in.values(), key=lambda form: form.precedence)
    if (row_format := next((form for form in by_precedence if form.matches(row)), None)) is None:
        raise MalformedData(
            f"no format recognised from the columns {', '.join(sorted(row)) or '(none)'}; expected prompt, messages, or "
            "question and answer, or else conversations, instruction or input"
        )
    return row_format
