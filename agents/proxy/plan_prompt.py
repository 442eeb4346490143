"""A request's messages → the ids of its prompt: the recorded ones and a bridge, or a fork with its cause; pure.

| the request                                             | its prompt                         | counted as          |
|---------------------------------------------------------|------------------------------------|---------------------|
| continues the answer of a turn, or one with text added  | the turn's tokens, then the bridge |                     |
| continues an older turn, which has another continuation | the same                           | `rewound`           |
| holds an answer sampled otherwise, or leaves one out    | the same, of the turn before it    | `edited_history`    |
| continues reasoning that the setting strips             | rendered as a whole                | `thinking_stripped` |
| continues a turn in a form for which there is no bridge | rendered as a whole                | `no_bridge`         |
| has other tools than all before                         | rendered as a whole                | `tools_changed`     |
| has another system message than all before              | rendered as a whole                | `system_changed`    |
| begins with other messages (a sub-agent, a summary)     | rendered as a whole                | `new_conversation`  |

What is rendered as a whole hangs on the longest recorded path that its ids begin with, or is a new root. Rendered
tokens are context, whatever they say: only what the engine sampled under these ids is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.agents.proxy.messages import Message, next_key
from penstock.agents.proxy.renderer import AnswerEnd, ChatRenderer, Rendered, without_reasoning
from penstock.agents.proxy.tree import ConversationTree, Found, PromptPlan, SampledTurn
from penstock.protocol.config.environment_settings import Thinking
from penstock.protocol.groups import RowImages
from penstock.protocol.images.admission import AdmittedImage
from penstock.protocol.images.processor import ImageProcessor, expanded, joined


@dataclass(slots=True)
class SeenRoots:
    requests: set[bytes] = field(default_factory=set)  # keys of all messages, with the tools
    with_tools: set[tuple[bytes, bytes]] = field(default_factory=set)  # keys of the tools, and of the first messages
    without_tools: set[bytes] = field(default_factory=set)  # keys of the first messages alone
    without_system: set[bytes] = field(default_factory=set)  # the same without the system message

    def note(self, found: Found) -> str:
        """Return why a conversation is new, and record it; empty for the first one, and for a repeated request."""
        messages = found.messages
        rest = messages[1:] if messages[0].role == "system" else messages
        whole, body = _key_of(messages[: len(messages) - len(rest) + 1]), _key_of(rest[:1])
        if not self.without_tools or found.key in self.requests:
            cause = ""
        elif (found.root, whole) in self.with_tools:
            cause = "edited_history"  # an answer was left out, or stands in another form
        elif whole in self.without_tools:
            cause = "tools_changed"
        elif body in self.without_system:
            cause = "system_changed"
        else:
            cause = "new_conversation"
        self.requests.add(found.key)
        self.with_tools.add((found.root, whole))
        self.without_tools.add(whole)
        self.without_system.add(body)
        return cause


def _key_of(messages: Sequence[Message]) -> bytes:
    key = b""
    for message in messages:
        key = next_key(key, message)
    return key


@dataclass(frozen=True, slots=True)
class PromptPlanner:
    renderer: ChatRenderer
    stop_token_ids: frozenset[int]
    thinking: Thinking

    def plan(
        self, tree: ConversationTree, roots: SeenRoots, match: Found, tools: Sequence[Any],
        processor: ImageProcessor | None = None,
    ) -> PromptPlan:  # fmt: skip
        """Return the prompt of a request, whose images the ``processor`` places.

        Raises MalformedData if the template refuses its messages, and ImageRefused for images that it does not show, or
        too many.
        """
        base = match.base
        if base is None:
            kept = self._messages_shown(match.messages)
            rendered = self.renderer.whole(kept, tools)
            cause = roots.note(match)
            return self._observed(tree, match, rendered, "edited_history" if match.is_edited else cause, processor)
        new = match.messages[match.num_matched :]
        if self._strips(base, new):
            rendered = self.renderer.whole(self._messages_shown(match.messages), tools)
            return self._observed(tree, match, rendered, "thinking_stripped", processor)
        last = int(base.token_ids[-1])
        stop = self.renderer.text_of([last]) if last in self.stop_token_ids else ""
        end = AnswerEnd(stop, in_reasoning=base.in_reasoning, added=match.added)
        has_system = match.messages[0].role == "system"
        bridge = self.renderer.bridge(base.answer, end, new, tools, has_system=has_system)
        if bridge is None:
            rendered = self.renderer.whole(match.messages, tools)
            return self._observed(tree, match, rendered, "no_bridge", processor)
        parent_tokens = base.num_tokens - (not bridge.keeps_stop_token)
        behind, images = _with_images(bridge.rendered.token_ids, new, processor, at=parent_tokens)
        return PromptPlan(
            found=match, parent=base, parent_tokens=parent_tokens,
            prompt_ids=_joined(base.path()[:parent_tokens], behind), opens_reasoning=bridge.rendered.opens_reasoning,
            fork=_cause_of_branch(tree, match, base, keeps=bridge.keeps_stop_token),
            images=joined(base.images, images),
        )  # fmt: skip

    def _observed(
        self, tree: ConversationTree, match: Found, rendered: Rendered, cause: str, processor: ImageProcessor | None
    ) -> PromptPlan:
        token_ids, images = _with_images(rendered.token_ids, match.messages, processor)
        prompt_ids = np.asarray(token_ids, dtype=np.int32)
        parent, length = tree.observe(prompt_ids, images)
        return PromptPlan(match, parent, length, prompt_ids, rendered.opens_reasoning, cause, images)

    def _strips(self, base: SampledTurn, new: Sequence[Message]) -> bool:
        """Return True if the recorded tokens hold reasoning that the setting does not show from here on."""
        if self.thinking == "keep" or (
            self.thinking == "tool_cycle" and not any(message.role == "user" for message in new)
        ):
            return False
        return any(turn.answer.reasoning for turn in base.chain())

    def _messages_shown(self, messages: Sequence[Message]) -> Sequence[Message]:
        if self.thinking == "keep":
            return messages
        last_user = max((n for n, message in enumerate(messages) if message.role == "user"), default=0)
        return without_reasoning(messages, before=len(messages) if self.thinking == "strip" else last_user)


def _with_images(
    token_ids: Sequence[int], messages: Sequence[Message], processor: ImageProcessor | None, *, at: int = 0
) -> tuple[Sequence[int], RowImages | None]:
    """Return rendered ids with all tokens of the images, of which each has one there; positions count from ``at``."""
    shown = [image for message in messages for image in message.images if isinstance(image, AdmittedImage)]
    if processor is None:
        assert not shown  # the session refuses images that nothing places
        return token_ids, None
    return expanded(token_ids, shown, processor, at=at)


def _cause_of_branch(tree: ConversationTree, match: Found, base: SampledTurn, *, keeps: bool) -> str:
    if match.is_edited:
        return "edited_history"
    if not keeps:
        return "other_stop_token"
    if any(turn.follows is base and turn.prompt_key != match.key for turn in tree.turns[base.number + 1 :]):
        return "rewound"
    return ""


def _joined(recorded: np.ndarray, new: Sequence[int]) -> np.ndarray:
    ids = np.empty(len(recorded) + len(new), dtype=np.int32)
    ids[: len(recorded)] = recorded
    ids[len(recorded) :] = new
    return ids
