"""Rows of Alpaca: ``instruction``, with further text in ``input``, earlier turns in ``history``, and ``output``."""

from typing import Any

from penstock.trainer.data.messages import Chat, refuse, shown
from penstock.trainer.row_format import RowFormat


def _extend(row: dict[str, Any], chat: Chat) -> Chat:
    more = row.get("input", "")
    if not isinstance(more, str):
        refuse("input", "expected a text", shown(more))
    if more:
        *before, last = chat
        content, more = last["content"], f"\n{more}"
        whole = content + more if isinstance(content, str) else [*content, {"type": "text", "text": more}]
        chat = (*before, {**last, "content": whole})
    return (*_earlier_turns(row.get("history") or []), *chat)


def _earlier_turns(pairs: Any) -> Chat:
    if not isinstance(pairs, list):
        refuse("history", "expected a list of pairs of texts", shown(pairs))
    for number, pair in enumerate(pairs):
        if not (isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            refuse(f"history[{number}]", "expected a pair of texts, question and answer", shown(pair))
    return tuple(
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    )


ALPACA = RowFormat(
    name="alpaca",
    columns="instruction, with input, output or history",
    required=("instruction",),
    precedence=70,
    prompt="instruction",
    prompt_parts=("input", "history"),
    extend=_extend,
    answer="output",
)
