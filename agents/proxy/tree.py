"""An episode's conversations as a tree of sampled answers; pure.

A *turn* is one request and its answer: the context tokens that were added to the turn before, and the sampled ones. The
tokens from a root to a turn are exactly those that the engine received and returned. A turn continues another one
behind its last token, or behind an earlier one where the template continues with another token than the sampled stop
token.

Messages find the turn, tokens verify it. A request that continues no turn begins a root, or a branch of an older turn.

The answer that was sent is the reference: its token ids are used, and its text where a history is rendered again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from penstock.agents.proxy.messages import Declared, Message, ToolCall, next_key, same_arguments, similar_arguments
from penstock.protocol.groups import FinishReason, RowImages
from penstock.protocol.token_annotations import ExpertChoices
from penstock.protocol.trajectory import Float32s, Int32s
from penstock.protocol.versions import VersionRun
from penstock.rollout_service.engines.completion import Completion
from penstock.rollout_service.errors import ReplyRefused


def is_copy(sent: Message, received: Message) -> bool:
    """Return True if ``received`` is a copy of the answer ``sent``.

    Outer white space may differ, and arguments as JSON texts; clients that do not know of reasoning leave it out. A
    call that has the id which the answer gave it may also differ in how scalars are written.
    """
    if received.role != "assistant" or len(sent.tool_calls) != len(received.tool_calls):
        return False
    if sent.content.strip() != received.content.strip():
        return False
    if received.reasoning.strip() not in ("", sent.reasoning.strip()):
        return False
    return all(_is_same_call(*calls) for calls in zip(sent.tool_calls, received.tool_calls, strict=True))


def added_text(turn: SampledTurn, received: Message) -> str | None:
    """Return what a client wrote behind its copy of an answer; None if it is no copy.

    Text may stand behind an answer that the client's stop string ended, behind that string, which is among the tokens.
    """
    if is_copy(turn.answer, received):
        return ""
    if turn.stop_sequence is None:
        return None
    whole, text = (turn.answer.content + turn.stop_sequence).lstrip(), received.content.lstrip()
    copied = replace(received, content=turn.answer.content)
    return text[len(whole) :] if text.startswith(whole) and is_copy(turn.answer, copied) else None


def _is_same_call(sent: ToolCall, received: ToolCall) -> bool:
    if sent.name != received.name:
        return False
    if same_arguments(sent.arguments, received.arguments):
        return True
    return sent.id == received.id and similar_arguments(sent.arguments, received.arguments)


@dataclass(eq=False, slots=True)
class SampledTurn:
    number: int
    follows: SampledTurn | None  # the turn whose answer the messages continue
    # the turn whose tokens the prompt continues; another one where the history was rendered again
    parent: SampledTurn | None
    parent_tokens: int  # so many tokens of the parent's path precede the context
    context_ids: Int32s
    token_ids: Int32s  # as sampled, the stop token included
    logprobs: Float32s  # of the sampled tokens
    version_runs: tuple[VersionRun, ...]  # positions count from the first sampled token
    finish_reason: FinishReason
    answer: Message  # as it was sent to the client
    prompt_key: bytes  # of the messages that it answers
    in_reasoning: bool  # it was cut before its reasoning ended
    images: RowImages | None = None  # of its path, by their positions there
    delivered: bool = False  # the client received all of it
    stop_sequence: str | None = None  # of the client's stop strings, the one that ended the answer
    new_messages: tuple[Message, ...] = ()  # of the request, behind the answer of the turn that it follows
    tools_key: bytes = b""  # tells the tools of the request apart; empty: it had none
    declared: Declared = ""  # what the agent said of the conversation
    # of the tokens from `experts_start` on but the last, where they were asked for
    experts: ExpertChoices | None = None

    @property
    def key(self) -> bytes:
        return b"turn:%d" % self.number

    @property
    def prompt_tokens(self) -> int:
        return self.parent_tokens + len(self.context_ids)

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + len(self.token_ids)

    def chain(self) -> list[SampledTurn]:
        turns: list[SampledTurn] = []
        turn: SampledTurn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    @property
    def experts_start(self) -> int:
        """The first token of the path whose experts this turn's request chose; the turns before chose those before.

        The last token of the parent is among them: it was sampled there, and is computed as the context of this turn.
        """
        return 0 if self.parent is None else min(self.parent_tokens, self.parent.num_tokens - 1)

    def path_experts(self) -> ExpertChoices | None:
        """Return the experts of all tokens of the path but the last, each of the request that brought the token."""
        if self.experts is None:
            return None
        ids = np.empty((self.num_tokens - 1, *self.experts.ids.shape[1:]), self.experts.ids.dtype)
        end, turn = len(ids), self
        while True:
            start = turn.experts_start
            if turn.experts is None or turn.experts.shape != self.experts.shape:
                return None
            ids[start:end] = turn.experts.ids[: end - start]
            if turn.parent is None:
                return ExpertChoices(self.experts.shape, ids)
            end, turn = start, turn.parent

    def path(self) -> Int32s:
        ids = np.empty(self.num_tokens, dtype=np.int32)
        end = self.num_tokens
        turn: SampledTurn | None = self
        while turn is not None:
            token_ids = np.concatenate((turn.context_ids, turn.token_ids))
            ids[turn.parent_tokens : end] = token_ids[: end - turn.parent_tokens]
            end, turn = turn.parent_tokens, turn.parent
        return ids


@dataclass(frozen=True, slots=True)
class Found:
    base: SampledTurn | None  # the turn that is continued
    num_matched: int  # messages up to the end of its answer
    key: bytes  # of all messages
    messages: tuple[Message, ...]  # with the answers that were sent in place of the client's copies
    is_edited: bool  # an answer stands where others were sampled, and is none of them
    root: bytes = b""  # key of the tools
    added: str = ""  # what the client wrote behind the answer of the base


@dataclass(frozen=True, slots=True, eq=False)
class PromptPlan:
    found: Found
    parent: SampledTurn | None
    parent_tokens: int
    prompt_ids: Int32s
    opens_reasoning: bool
    fork: str  # why the prompt does not simply extend the last answer; empty if it does
    images: RowImages | None = None  # ``prompt_ids`` hold all of their tokens


@dataclass(slots=True)
class _Path:
    key: bytes
    messages: list[Message]
    base: SampledTurn | None = None
    num_matched: int = 0
    is_edited: bool = False
    added: str = ""

    def go_on(self, message: Message) -> None:
        self.key = next_key(self.key, message)
        self.messages.append(message)

    def reach(self, turn: SampledTurn, added: str) -> None:
        answer = turn.answer
        self.key = turn.key
        if added:
            self.key = next_key(turn.key, Message("assistant", added))
            answer = replace(answer, content=f"{answer.content}{turn.stop_sequence}{added}")
        self.messages.append(answer)
        self.base, self.num_matched, self.added = turn, len(self.messages), added


@dataclass(slots=True)
class ConversationTree:
    turns: list[SampledTurn] = field(default_factory=list)
    num_stored_tokens: int = 0
    _by_prompt: dict[bytes, list[SampledTurn]] = field(default_factory=dict)

    def find(self, root: bytes, messages: Sequence[Message]) -> Found:
        """Return the deepest turn that the messages continue; of equal ones the last."""
        paths = [_Path(root, [])]
        for message in messages:
            if message.role != "assistant":
                for path in paths:
                    path.go_on(message)
                continue
            following: list[_Path] = []
            for path in paths:
                sampled = self._by_prompt.get(path.key, ())
                found = ((turn, added_text(turn, message)) for turn in sampled)
                copies = [(turn, added) for turn, added in found if added is not None]
                for copy in copies[:-1]:
                    following.append(replace(path, messages=list(path.messages)))
                    following[-1].reach(*copy)
                if copies:
                    path.reach(*copies[-1])
                else:
                    path.is_edited = path.is_edited or bool(sampled)
                    path.go_on(message)
                following.append(path)
            paths = following
        best = max(paths, key=lambda path: (path.num_matched, path.base.number if path.base else -1))
        return Found(best.base, best.num_matched, best.key, tuple(best.messages), best.is_edited, root, best.added)

    def observe(self, prompt_ids: Int32s, images: RowImages | None = None) -> tuple[SampledTurn | None, int]:
        """Return the longest recorded path that a prompt with images begins with, and its length; else (None, 0)."""
        inside: set[int] = set()
        best: SampledTurn | None = None
        for turn in self.turns:
            if turn.parent is not None and turn.parent.number not in inside:
                continue
            begin, end = turn.parent_tokens, turn.num_tokens
            token_ids = np.concatenate((turn.context_ids, turn.token_ids))
            same = len(prompt_ids) >= end and np.array_equal(prompt_ids[begin:end], token_ids)
            if same and turn.images == (images.before(end) if images is not None else None):
                inside.add(turn.number)
                if best is None or end > best.num_tokens:
                    best = turn
        return best, best.num_tokens if best is not None else 0

    def commit(
        self, plan: PromptPlan, completion: Completion, answer: Message, *, in_reasoning: bool = False
    ) -> SampledTurn:
        """Add an answer; raises ReplyRefused for a prompt off the recorded path, or figures that do not fit its tokens."""
        base, parent_tokens, prompt_ids = plan.parent, plan.parent_tokens, plan.prompt_ids
        if base is not None and not np.array_equal(prompt_ids[:parent_tokens], base.path()[:parent_tokens]):
            raise ReplyRefused(
                f"the prompt of {len(prompt_ids)} tokens does not begin with the {parent_tokens} recorded tokens of "
                f"turn {base.number}; internal error, please report"
            )
        if len(completion.logprobs) != len(completion.token_ids) or not completion.token_ids:
            raise ReplyRefused(
                f"{len(completion.logprobs)} log-probabilities for {len(completion.token_ids)} tokens of an answer"
            )
        turn = SampledTurn(
            number=len(self.turns), follows=plan.found.base, parent=base, parent_tokens=parent_tokens,
            context_ids=prompt_ids[parent_tokens:].copy(), token_ids=np.asarray(completion.token_ids, dtype=np.int32),
            logprobs=np.asarray(completion.logprobs, dtype=np.float32), version_runs=completion.version_runs,
            finish_reason=completion.finish_reason, answer=answer, prompt_key=plan.found.key,
            in_reasoning=in_reasoning, images=plan.images, new_messages=plan.found.messages[plan.found.num_matched :],
        )  # fmt: skip
        if completion.experts is not None:
            choices = completion.experts
            if len(choices.ids) != turn.num_tokens - 1:
                raise ReplyRefused(
                    f"experts of {len(choices.ids)} tokens for an answer that ends with token {turn.num_tokens} of its "
                    f"conversation, expected {turn.num_tokens - 1}: all but the last"
                )
            turn.experts = replace(choices, ids=choices.ids[turn.experts_start :].copy())
        self.turns.append(turn)
        self._by_prompt.setdefault(plan.found.key, []).append(turn)
        self.num_stored_tokens += len(turn.context_ids) + len(turn.token_ids)
        return turn
