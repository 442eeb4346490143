"""Whether a client's copy of an answer is the answer that was sent to it; pure.

The answer that was sent is the reference: its token ids are used, and its text where a history is rendered again.
"""

from __future__ import annotations

from typing import Literal

from penstock.agents.proxy.messages import Message, ToolCall, same_arguments, similar_arguments

HistoryMatch = Literal["strict", "json", "echo"]


def is_copy(sent: Message, received: Message, rule: HistoryMatch) -> bool:
    """Return True if ``received`` is a copy of the answer ``sent``.

    ``strict``: every text is equal. ``json``: arguments are equal as JSON, and everything else is. ``echo``: outer white space may differ
    too, and the reasoning may be absent, as clients that do not know of it leave it out.

    Under ``json`` and ``echo``, a call that has the id which the answer gave it may also differ in how scalars are written.
    """
    if received.role != "assistant" or len(sent.tool_calls) != len(received.tool_calls):
        return False
    if rule == "echo":
        texts = sent.content.strip() == received.content.strip()
        reasoning = not received.reasoning.strip() or sent.reasoning.strip() == received.reasoning.strip()
    else:
        texts, reasoning = sent.content == received.content, sent.reasoning == received.reasoning
    calls = zip(sent.tool_calls, received.tool_calls, strict=True)
    return texts and reasoning and all(_is_same_call(one, other, rule) for one, other in calls)


def _is_same_call(sent: ToolCall, received: ToolCall, rule: HistoryMatch) -> bool:
    if sent.name != received.name:
        return False
    if rule == "strict":
        return sent.arguments == received.arguments and sent.id == received.id
    if same_arguments(sent.arguments, received.arguments):
        return True
    return sent.id == received.id and similar_arguments(sent.arguments, received.arguments)
