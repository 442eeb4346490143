"""`lookup`: the answer to a question is not in the question; the policy has to ask for it, and then to repeat it.

Two turns. The row's prompt asks for a key ("get 37"); the policy writes ``?37``; the environment answers with the key's value, which
follows from the seed alone; the policy writes the value. A wrong key gets the value of that key, so that only the right question helps.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

from penstock.agents.environments.play import Play, Reply, Row, done, say
from penstock.agents.environments.turn_environment import TurnEnvironment
from penstock.agents.proxy.messages import Message

_QUESTION = re.compile(r"\?\s*(\d{1,9})")
_KEY = re.compile(r"\d{1,9}")


def value_of(seed: int, key: str) -> str:
    digest = hashlib.sha256(f"{seed}\0{key}".encode()).digest()
    return f"{int.from_bytes(digest[:4]) % 100:02d}"


class LookupPlay(Play):
    def __init__(self, seed: int, prompt: tuple[Message, ...], key: str) -> None:
        self._seed = seed
        self._prompt = prompt
        self._key = key
        self._asked = False

    def start(self) -> tuple[Message, ...]:
        return self._prompt

    def step(self, answer: Message) -> Reply:
        question = _QUESTION.fullmatch(answer.content.strip())
        if question is not None and not self._asked:
            self._asked = True
            return say(value_of(self._seed, question[1]))
        is_right = self._asked and answer.content.strip() == value_of(self._seed, self._key)
        return done(1.0 if is_right else 0.0, asked=float(self._asked))


class Lookup(TurnEnvironment):
    name = "lookup"
    version = "1"

    def play(self, seed: int, row: Row, options: Any) -> LookupPlay:
        text = row.messages[-1].content if row.messages else ""
        keys = _KEY.findall(text)
        if len(keys) != 1:
            raise ValueError(f"the prompt names {len(keys)} keys, expected one number: {text[:100]!r}")
        return LookupPlay(seed, row.messages, keys[0])


LOOKUP = Lookup()
