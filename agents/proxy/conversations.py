"""Which answers of an episode are of its main conversation, whose last one a reward reads; pure.

Agents make side requests beside it: a title of the session, a summary, its topic. What the agent declares holds (the header
`x-penstock-conversation`). Without it the main conversation is the first one that is no side request, with the roots that carry it on:
a history that was compacted or edited, other tools, a system message that changes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from penstock.agents.proxy.messages import Message, next_key
from penstock.agents.proxy.tree import SampledTurn

_OBJECT = r"(?:titles?|headlines?|topics?|summar(?:y|ies)|subject lines?|tags?|labels?|keywords?|commit messages?|follow-?up questions?)\b"
_TALK = (
    r"(?:conversations?|chats?|sessions?|threads?|dialogues?|discussions?|exchanges?|messages?|transcripts?|history)\b"
)
_SIDE = re.compile(
    r"\b(?:generat|writ|creat|giv|suggest|provid|produc|mak|pick|choos|return|output|extract|propos|repl|respond|analy|determin|identif|nam|"
    rf"come|need|want|what|which)\w*\W+(?:[\w'-]+\W+){{0,8}}?{_OBJECT}"
    rf"|\bsummari[sz]\w*\W+(?:[\w'-]+\W+){{0,8}}?{_TALK}"
    rf"|^\W*{_OBJECT}\W|\b(?:title|topic|summary)\W+(?:generator|writer|extractor|summarizer)",
    re.IGNORECASE,
)
_TITLE_OF_TALK = re.compile(
    rf"\btitle\b[^.!?]{{0,80}}\b{_TALK}|\b{_TALK}[^.!?]{{0,40}}\btitle\b", re.IGNORECASE
)  # asked within the conversation itself
_READ_CHARACTERS = 600  # at either end of a message: instructions stand there


@dataclass(slots=True)
class Conversation:
    """Answers to requests with one beginning, and those that continue them."""

    root: SampledTurn
    turns: list[SampledTurn] = field(default_factory=list)
    goes_on: bool = False  # an answer in it was continued

    @property
    def is_side(self) -> bool:
        """Whether it looks like a side request: one answer, no tools, and a text that asks for a title or the like."""
        return not (self.root.tools_key or self.goes_on) and asks_aside(self.root.new_messages, _SIDE)


def asks_aside(messages: Sequence[Message], pattern: re.Pattern[str]) -> bool:
    last = next((message for message in reversed(messages) if message.role == "user"), None)
    texts = [message.content for message in messages if message.role == "system" or message is last]
    return any(
        pattern.search(text[:_READ_CHARACTERS]) or pattern.search(text[-_READ_CHARACTERS:].lstrip()) for text in texts
    )


def main_turns(turns: Sequence[SampledTurn]) -> set[int]:
    """Return the numbers of the answers of the main conversation; not empty unless ``turns`` are."""
    declared = {turn.number for turn in turns if turn.declared == "main"}
    if declared:
        return declared
    everything = _conversations(turns)
    talks = [talk for talk in everything if any(turn.declared != "side" for turn in talk.turns)] or everything
    if not talks:
        return set()
    main = _first(talks)
    numbers = {turn.number for talk in talks if talk is main or _carries_on(talk, main) for turn in talk.turns}
    followed = {turn.follows.number for turn in turns if turn.follows is not None}
    aside = {
        turn.number
        for turn in turns
        if turn.declared == "side"
        or (turn.follows is not None and turn.number not in followed and asks_aside(turn.new_messages, _TITLE_OF_TALK))
    }
    return numbers - aside or numbers


def scored_turn(turns: Sequence[SampledTurn], trained: Collection[int]) -> int | None:
    """Return the number of the answer that a reward reads: the last trained one of the main conversation; None: nothing is trained."""
    return max(set(trained) & main_turns(turns) or trained, default=None)


def messages_of(turn: SampledTurn) -> tuple[Message, ...]:
    """Return the conversation of an answer up to it, with the answers that were sent in place of the client's copies."""
    parts: list[Message] = []
    at: SampledTurn | None = turn
    while at is not None:
        parts += (at.answer, *reversed(at.new_messages))
        at = at.follows
    return tuple(reversed(parts))


def _conversations(turns: Sequence[SampledTurn]) -> list[Conversation]:
    by_turn: dict[int, Conversation] = {}
    by_start: dict[tuple[bytes, str, bytes], Conversation] = {}
    for turn in turns:
        talk = by_turn.get(turn.follows.number) if turn.follows is not None else None
        if talk is not None:
            talk.goes_on = True
        else:
            start = (turn.tools_key, _system(turn), _first_key(turn))
            talk = by_start.setdefault(start, Conversation(turn))
        talk.turns.append(turn)
        by_turn[turn.number] = talk
    return list(by_start.values())


def _first(talks: Sequence[Conversation]) -> Conversation:
    """Return the first conversation that is no side request: not one short request without tools, where an agent with tools follows."""
    with_tools = any(talk.root.tools_key for talk in talks)
    rules: tuple[Callable[[Conversation], bool], ...] = (
        lambda talk: not talk.is_side and bool(talk.root.tools_key or talk.goes_on or not with_tools),
        lambda talk: not talk.is_side,
    )
    return next((talk for rule in rules for talk in talks if rule(talk)), talks[0])


def _carries_on(talk: Conversation, main: Conversation) -> bool:
    """Return True if a root is the main conversation, under another beginning."""
    has_history = any(message.role == "assistant" for message in talk.root.new_messages)
    if talk.is_side:
        return False
    if has_history and _first_key(talk.root) == _first_key(main.root):
        return True
    same = talk.root.tools_key == main.root.tools_key and _system(talk.root) == _system(main.root)
    return same and bool(talk.root.tools_key or _system(talk.root) or has_history or talk.goes_on)


def _system(turn: SampledTurn) -> str:
    first = turn.new_messages[0] if turn.new_messages else None
    return first.content if first is not None and first.role == "system" else ""


def _first_key(turn: SampledTurn) -> bytes:
    first = next((message for message in turn.new_messages if message.role != "system"), None)
    return b"" if first is None else next_key(b"", first)
