"""Which answers of an episode are of its main conversation, whose last one a reward reads; pure.

Agents make side requests beside it: a title of the session, a summary for their memory, a guess of what comes next. What the agent
declares holds (the header `x-penstock-conversation`). Without it every answer is of the main conversation, however the agent builds its
prompts, but those that are recognised as side requests: by their text, or by what goes on around them.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from penstock.agents.proxy.messages import AgentRequest, Message, next_key
from penstock.agents.proxy.tree import SampledTurn

_TALK = r"(?:conversations?|chats?|sessions?|threads?|dialogues?|dialogs?|discussions?|exchanges?|messages?|transcripts?|history)\b"
_VERBS = (
    r"(?:generat|writ|creat|giv|suggest|provid|produc|mak|pick|choos|return|output|extract|propos|repl|respond|analy|determin|identif|nam|"
    r"come|need|want|what|which)\w*"
)
_OBJECT = r"(?:titles?|headlines?|topics?|subject lines?|branch names?|commit messages?|follow-?up questions?)\b"
_WORDS = r"\W+(?:[\w'-]+\W+){0,8}?"
_CONVERSATION = r"(?:conversation|chat|session|thread|dialogue|dialog|discussion|(?:this|the|our) history)s?\b"
_MAKES = r"\b(?:generat|writ|creat|giv|suggest|provid|produc|mak|propos|choos|pick|repl|com|what)(?:e|y|ing)?\b"
_ASKED_BEHIND = (  # also behind the history of the main conversation
    rf"{_MAKES}[^.!?]{{0,60}}(?:\btitle\b[^.!?]{{0,80}}\b{_CONVERSATION}|\b{_CONVERSATION}[^.!?]{{0,40}}\btitle\b)"
    rf"|\b{_CONVERSATION}[^.!?]{{0,60}}{_MAKES}[^.!?]{{0,40}}\btitle\b"
    rf"|\bsummari[sz](?:es?|ing)\b{_WORDS}{_CONVERSATION}"
    rf"|{_MAKES}{_WORDS}summar(?:y|ies)\b{_WORDS}{_CONVERSATION}"
    r"|\bsuggestion mode\b|\buser\b[^.!?]{0,40}\b(?:type|ask|say)\W+next\b|\buser'?s\W+next\W+(?:message|prompt|question|input)\b"
    r"|\b(?:suggest|generate|propose|write)\w*\W+(?:[\w'-]+\W+){0,8}?follow-?up\W+(?:question|prompt|message|quer)"
    r"|\bwho\W+(?:[\w'-]+\W+){0,3}?(?:speak|talk|repl(?:y|ies)|respond)s?\W+next\b|\bnext[_ -](?:speaker|role)\b"
    r"|\brecap\b[^.!?]{0,40}\b(?:words|sentences?|lines?)\b|\bwhere we left off\b|\bcontext checkpoint\b|\bhand-?off summary\b"
    rf"|\b{_TALK}[^.!?]{{0,60}}\b(?:stuck|in a loop|repetitive)\b"
)
_BEHIND = re.compile(_ASKED_BEHIND, re.IGNORECASE)
_ALONE = re.compile(
    rf"{_ASKED_BEHIND}|\btitle\b[^.!?]{{0,80}}\b{_TALK}|\b{_TALK}[^.!?]{{0,40}}\btitle\b|\b{_VERBS}{_WORDS}{_OBJECT}|^\W*{_OBJECT}\W|\b(?:title|topic|summary)\W+(?:generator|writer|extractor|summarizer)"
    rf"|\bsummari[sz](?:es?|ing)\b{_WORDS}{_TALK}|\b(?:name|emoji|icon|label|tags?|topics?|keywords?)\b[^.!?]{{0,60}}\b{_TALK}"
    rf"|\bdescription of\W+(?:this|the|our)\W+{_TALK}|\bmemor(?:y|ies)\W+(?:writ|manag|extract)\w*|\bstate summary\b"
    r"|^\W*(?:quota|ping|warm-?up)\W*$|\bprocess\w* bash commands?\b|\bcommand prefix|\bfile ?paths?\b[^.!?]{0,40}\bcommand\b"
    r"|\b(?:is|are|does|do|check|classify|determine|decide|judge)\b[^.!?]{0,80}\b(?:un)?safe\b(?!\W+to\b)"
    r"|\b(?:violat|comply with|compliant with|against)\w*\W+(?:[\w'-]+\W+){0,4}?(?:polic(?:y|ies)|guidelines?)\b|\bmoderat(?:ion|or)\b",
    re.IGNORECASE,
)
_SUMMARY = re.compile(r"summar|compact|condens|hand-?off|recap", re.IGNORECASE)
_READ_CHARACTERS = 600  # at either end of a message: instructions stand there
_FEWEST_DELEGATED = 12  # characters of an argument that are the task of a sub-agent
_MAX_SUMMARIES = 8  # the last ones before a root, which it may go on from


@dataclass(slots=True)
class Conversation:
    """Answers to requests with one beginning, and those that continue them."""

    root: SampledTurn
    turns: list[SampledTurn] = field(default_factory=list)
    goes_on: bool = False  # an answer in it was continued

    @property
    def works(self) -> bool:
        return bool(self.root.tools_key) or self.goes_on


def is_recognised(messages: Sequence[Message], *, has_tools: bool, known: Iterable[str] = (), task: str = "") -> bool:
    """Return whether messages ask for a title, a summary, a suggestion or the like of a conversation, by their last text.

    ``known`` are summaries that are left out of the texts, and a match that stands in ``task`` too is of the task.
    """
    last = next((message for message in reversed(messages) if message.role != "system"), None)
    is_behind = has_tools or any(message.role == "assistant" for message in messages)
    for message in messages:
        if message.role == ("user" if message is last else "system") and (message is last or not has_tools):
            text = message.content
            for summary in known:
                text = text.replace(summary, " ")
            matches = [match[0] for end in _ends(text) for match in (_BEHIND if is_behind else _ALONE).finditer(end)]
            if any(match.lower() not in task.lower() for match in matches):
                return True
    return False


def is_side_request(request: AgentRequest, turns: Sequence[SampledTurn]) -> bool:
    """Return whether a request beside these answers is declared or recognised as a side request; the first of an episode never is."""
    if request.conversation or not turns:
        return request.conversation == "side"
    return is_recognised(request.messages, has_tools=bool(request.tools), task=_task(_conversations(turns)))


def main_turns(turns: Sequence[SampledTurn]) -> set[int]:
    """Return the numbers of the answers of the main conversation; not empty unless ``turns`` are."""
    declared = {turn.number for turn in turns if turn.declared == "main"}
    if declared:
        return declared
    numbers = {turn.number for turn in turns if turn.declared != "side"} - recognised_turns(turns)
    return numbers or {turn.number for talk in _conversations(turns)[:1] for turn in talk.turns}


def recognised_turns(turns: Sequence[SampledTurn]) -> set[int]:
    """Return the numbers of the answers to side requests that the agent did not declare."""
    talks = [talk for talk in _conversations(turns) if any(turn.declared != "side" for turn in talk.turns)]
    carried = _carried(turns, talks)
    known, task = [text for texts in carried.values() for text in texts], _task(talks)
    followed = {turn.follows.number for turn in turns if turn.follows is not None}
    aside = {
        turn.number
        for turn in turns
        if turn.follows is not None and turn.number not in followed and turn.answer.content.strip() not in known
        and is_recognised(turn.new_messages, has_tools=True, task=task)
    }  # fmt: skip
    side = [talk for talk in talks if _is_side(talk, carried.get(talk.root.number, ()), task)]
    works = [talk for talk in talks if talk not in side and talk.works]
    with_tools = [talk for talk in works if talk.root.tools_key and talk.goes_on]
    calls = ((talk, turn.number, call) for talk in talks for turn in talk.turns for call in turn.answer.tool_calls)
    given = [(talk, number, text) for talk, number, call in calls for text in _delegated(call.arguments)]
    for talk in talks:
        first, last = talk.root.number, talk.turns[-1].number
        around = [other for other in works if other.root.number < first and _last(other, aside) > last]
        beside = around or ([] if talk.works else with_tools)
        is_aside = bool(beside) and not any(_carries_on(talk, other) for other in beside)
        begins = next((message.content for message in talk.root.new_messages if message.role != "system"), "")
        # a call under another beginning gave it its task: a sub-agent
        is_given = any(n < first and text in begins and not _carries_on(talk, other) for other, n, text in given)
        if (is_aside or is_given) and first not in carried:
            side.append(talk)
    if not works:
        side = [talk for talk in side if talk is not talks[0]]
    return aside | {turn.number for talk in side for turn in talk.turns}


def is_of_another_agent(turns: Sequence[SampledTurn], number: int | None) -> bool:
    """Return True if an answer is under another system message than the first one, which is all that tells their agents apart."""
    if number is None or any(turn.declared for turn in turns):
        return False
    first, talk = turns[0], next(talk for talk in _conversations(turns) if turns[number] in talk.turns)
    has_history = any(message.role == "assistant" for message in talk.root.new_messages)
    return not has_history and talk.root is not first and _system(talk.root) != _system(first)


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


def _delegated(arguments: str) -> list[str]:
    with contextlib.suppress(ValueError, RecursionError, AttributeError):
        texts = [value.strip() for value in json.loads(arguments).values() if isinstance(value, str)]
        return [text for text in texts if len(text) >= _FEWEST_DELEGATED]
    return []


def _task(talks: Sequence[Conversation]) -> str:
    """Return the texts of the first request that is no side request, else of the first."""
    talk = next((talk for talk in talks if not _is_side(talk, (), "")), talks[0] if talks else None)
    return "" if talk is None else "\n".join(message.content for message in talk.root.new_messages)


def _is_side(talk: Conversation, known: Iterable[str], task: str) -> bool:
    has_tools = bool(talk.root.tools_key)
    return not talk.goes_on and is_recognised(talk.root.new_messages, has_tools=has_tools, known=known, task=task)


def _carried(turns: Sequence[SampledTurn], talks: Sequence[Conversation]) -> dict[int, list[str]]:
    """Return the summaries that the text of a root goes on from, by the root's number."""

    def asks(turn: SampledTurn) -> bool:
        return any(_SUMMARY.search(end) for message in turn.new_messages for end in _ends(message.content))

    asked = [turn for turn in turns if turn.answer.content.strip() and asks(turn)]
    carried: dict[int, list[str]] = {}
    for talk in talks:
        texts = [message.content for message in talk.root.new_messages]
        before = [turn.answer.content.strip() for turn in asked if turn.number < talk.root.number][-_MAX_SUMMARIES:]
        if summaries := [summary for summary in before if any(summary in text for text in texts)]:
            carried[talk.root.number] = summaries
    return carried


def _ends(text: str) -> tuple[str, str]:
    return text[:_READ_CHARACTERS], text[-_READ_CHARACTERS:].lstrip()


def _last(talk: Conversation, aside: Collection[int]) -> int:
    return max((turn.number for turn in talk.turns if turn.number not in aside), default=-1)


def _carries_on(talk: Conversation, other: Conversation) -> bool:
    """Return True if a root is another conversation under another beginning: a history that was edited, other tools."""
    has_history = any(message.role == "assistant" for message in talk.root.new_messages)
    if has_history and _first_key(talk.root) == _first_key(other.root):
        return True
    same = talk.root.tools_key == other.root.tools_key and _system(talk.root) == _system(other.root)
    return same and bool(talk.root.tools_key or _system(talk.root) or has_history or talk.goes_on)


def _system(turn: SampledTurn) -> str:
    first = turn.new_messages[0] if turn.new_messages else None
    return first.content if first is not None and first.role == "system" else ""


def _first_key(turn: SampledTurn) -> bytes:
    first = next((message for message in turn.new_messages if message.role != "system"), None)
    return b"" if first is None else next_key(b"", first)
