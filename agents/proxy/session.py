"""One open episode: an agent's requests, answered by the policy and recorded in a tree until the episode ends."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import structlog
from pydantic import Field

from penstock.agents.proxy.answer_formats.answer_format import ANSWER_FORMATS, AnswerFormat
from penstock.agents.proxy.calls import Calls, Clock, Pace
from penstock.agents.proxy.conversations import (
    is_of_another_agent,
    is_side_request,
    messages_of,
    recognised_turns,
    scored_turn,
)
from penstock.agents.proxy.messages import AgentRequest, Message, RequestRefused, RetryMark, ToolCall, invalid, root_key
from penstock.agents.proxy.plan_prompt import PromptPlanner, SeenRoots
from penstock.agents.proxy.renderer import ChatRenderer
from penstock.agents.proxy.rows import TreeRows, build_rows
from penstock.agents.proxy.system_messages import merged, without_lines
from penstock.agents.proxy.tree import ConversationTree, PromptPlan, SampledTurn
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.config.environment_settings import RequestRules, Thinking
from penstock.protocol.errors import BlobError, ImageRefused, MalformedData
from penstock.protocol.groups import MAX_IMAGES, Sampling, derived_seed
from penstock.protocol.images.processor import ImageProcessor
from penstock.rollout_service.engines.completion import Completion
from penstock.rollout_service.engines.engine_client import ImagePrompt
from penstock.rollout_service.errors import EngineError, EngineTimeout, ReplyRefused, TaskRefused
from penstock.rollout_service.run_images import RunImages

log = structlog.get_logger("rollout.episode")
_ENDED_KEPT = 4096  # secrets of ended episodes, so that late requests are told so
_CHARACTERS_ON_THE_LOOP = 32_768  # longer prompts are rendered on a thread, so that other episodes go on
_MAX_STOP_STRINGS = 16
# The limits of an episode by the codes of their refusals.
_LIMITS = {"context_length_exceeded": "context", "max_turns": "max_turns", "max_stored_tokens": "max_stored_tokens"}


class EpisodeLimits(RequestRules):
    max_turns: int = Field(default=1000, ge=1)  # answers of one episode
    max_running: int = Field(default=64, ge=1)  # requests of one episode that are sampled at once
    max_messages: int = Field(default=4096, ge=1)  # of one request
    max_body_bytes: int = Field(default=16 * 1024**2, ge=1)  # of one request
    max_stored_tokens: int = Field(default=4_000_000, ge=1)  # that are recorded of one episode, at 8 to 12 bytes each
    answer_deadline_s: float = Field(default=900.0, gt=0)
    body_deadline_s: float = Field(default=60.0, gt=0)  # for a client to send a request
    # Before the status 200 of a stream; an error until then has its own.
    stream_wait_s: float = Field(default=60.0, ge=0)
    stream_comment_s: float = Field(default=3.0, gt=0)  # between the comments that keep a stream open
    # That a call goes on after its client has disconnected, in which a retry may join it.
    retry_grace_s: float = Field(default=5.0, ge=0)
    kept_answers: int = Field(default=64, ge=1)  # finished ones that a retry may ask for again
    kept_answers_s: float = Field(default=600.0, ge=0)  # for which it may


class Samples(Protocol):
    async def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, n: int, *, seeds: Sequence[int] | None = None
    ) -> list[list[Completion]]: ...


@dataclass(frozen=True, slots=True)
class AgentModel:
    planner: PromptPlanner
    answer_format: AnswerFormat
    context_tokens: int | None
    pace: Pace = field(default_factory=Pace)

    @classmethod
    def of(
        cls, tokenizer: ChatTokenizer, answer_format: str, context_tokens: int | None, thinking: Thinking = "keep"
    ) -> Self:
        planner = PromptPlanner(ChatRenderer(tokenizer), frozenset(tokenizer.eos_ids), thinking)
        return cls(planner, ANSWER_FORMATS.find(answer_format).value, context_tokens)


class EpisodeSession:
    """The record of one episode. For one event loop."""

    def __init__(
        self, episode_id: str, model: AgentModel, sampler: Samples, sampling: Sampling, limits: EpisodeLimits,
        seed: int | None = None, images: RunImages | None = None,
    ) -> None:  # fmt: skip
        """Begin without a turn; ``sampling`` is the task's, which overrules the agent's.

        Without a ``seed`` answers are random. Images of messages are stored with ``images``; None: they are refused.
        """
        self.id = episode_id
        self.temperature = sampling.temperature
        self.secret = secrets.token_urlsafe(24)
        self.tree = ConversationTree()
        self.counts: Counter[str] = Counter()
        # The limit that refused the last request, until one is within it; the last failure, until one is answered.
        self.truncated_by = self.failed_by = ""
        self.ended = False
        self._made: TreeRows | None = None  # at its end
        self._model = model
        self._sampler = sampler
        self._sampling = sampling
        self._limits = limits
        self._roots = SeenRoots()
        self.calls = Calls(grace_s=limits.retry_grace_s, kept=limits.kept_answers, kept_s=limits.kept_answers_s)
        self._num_running = 0
        self.clock = Clock(model.pace)
        self._waiting: dict[int, AgentRequest] = {}  # for the engine, by the number of the request
        self._seed = seed
        self._images = images
        self._num_sampled = 0  # answers begun, each with a different seed
        self._num_requests = 0  # begun
        self._failed_request = self._answered_request = 0  # the last one

    @property
    def orphaned_tokens(self) -> Counter[str]:
        """Sampled tokens that are in no turn, by cause; `build_rows` counts those of turns that are in no row."""
        prefix = "orphaned_tokens."
        return Counter({name.removeprefix(prefix): n for name, n in self.counts.items() if name.startswith(prefix)})

    async def answer(self, request: AgentRequest, mark: RetryMark) -> SampledTurn:
        """Return the policy's answer, or that of the running or finished call which this request repeats.

        Raises RequestRefused.
        """
        if self.ended:
            raise episode_ended(self.id)
        self.counts["requests"] += 1
        turn, joined = await self.calls.run(mark, lambda: self._sample(request))
        self.counts["retries_joined"] += joined
        return turn

    @property
    def messages(self) -> tuple[Message, ...]:
        """The main conversation up to its last answer; once the episode has ended, up to the one that is scored."""
        turns = self.tree.turns
        number = self._made.scored if self._made is not None else scored_turn(turns, range(len(turns)))
        return () if number is None else messages_of(turns[number])

    def end(self) -> TreeRows:
        self.ended = True
        for number in self._waiting:
            self._note_stall(number)
        self.calls.cancel()
        self._made = made = build_rows(self.tree.turns, self._limits.trained_conversations)
        self.counts.update(
            last_answer_not_scored=int(made.scored != made.last),
            recognised_side_requests=len(recognised_turns(self.tree.turns)),
            scored_another_agent=int(is_of_another_agent(self.tree.turns, made.scored)),
        )
        return made

    async def _sample(self, request: AgentRequest) -> SampledTurn:
        number = self._num_requests = self._num_requests + 1
        try:
            turn = await self._sampled(request, number)
        except Exception as err:
            self._note_failure(request, err, number)
            raise
        is_noted = self.truncated_by == "context" or self.failed_by
        if is_noted and not is_side_request(request, self.tree.turns[: turn.number]):
            self.truncated_by = "" if self.truncated_by == "context" else self.truncated_by
            self.failed_by = "" if number > self._failed_request else self.failed_by
        self._answered_request = max(self._answered_request, number)
        return turn

    def _note_failure(self, request: AgentRequest, error: Exception, number: int) -> None:
        code, status = (error.code, error.status) if isinstance(error, RequestRefused) else ("internal_error", 500)
        if is_side_request(request, self.tree.turns):
            return
        if code in _LIMITS:
            self.truncated_by = _LIMITS[code]
        elif status >= 500 and number > self._answered_request:
            self.failed_by, self._failed_request = code, max(self._failed_request, number)

    def _note_stall(self, number: int) -> None:
        """Note a request as failed that is given up, if the engine has stalled in it."""
        if self.clock.is_stalled(number):
            self._note_failure(self._waiting[number], RequestRefused(504, "engine_timeout", "given up"), number)

    def fail(self, code: str) -> None:
        """Note a request that failed before it was read, or behind its answer, through no fault of the agent."""
        self._num_requests += 1
        self.failed_by, self._failed_request = code, self._num_requests

    async def count_tokens(self, request: AgentRequest) -> int:
        """Return the number of tokens of the prompt that a request would have now; raises RequestRefused."""
        self.counts["token_counts"] += 1
        request = self._prepared(request, Counter())
        if request.messages[-1].role == "assistant":  # clients count the parts of a history too
            request = replace(request, messages=(*request.messages, Message("user")))
        return len((await self._plan(request, SeenRoots())).prompt_ids)

    def _prepared(self, request: AgentRequest, counts: Counter[str]) -> AgentRequest:
        """Return a request with the system messages that the policy sees."""
        messages, num_stripped = without_lines(request.messages, self._limits.stripped_lines)
        counts["stripped_lines"] += num_stripped
        if any(message.role == "system" for message in messages[1:]) and self._model.planner.renderer.wants_one_system:
            messages, num_merged = merged(messages)
            counts["merged_system_messages"] += num_merged
        return replace(request, messages=messages)

    async def _sampled(self, request: AgentRequest, number: int) -> SampledTurn:
        self._check_limits()
        request = self._prepared(request, self.counts)
        self._num_running += 1
        try:
            plan = await self._plan(request)
            sampling = self._sampling_of(request, len(plan.prompt_ids))
            if self.truncated_by and not is_side_request(request, self.tree.turns):
                self.truncated_by = ""  # the agent went on within the limits
            self._waiting[number] = request
            completion = await self._timed_completion(plan, sampling, number)
        finally:
            self._num_running -= 1
            self._waiting.pop(number, None)
        self.counts["sampled_tokens"] += len(completion.token_ids)
        if self.ended:
            self.counts["orphaned_tokens.after_end"] += len(completion.token_ids)
            raise episode_ended(self.id)
        for name in request.overruled:
            self.counts[f"overruled.{name}"] += 1
        answer, in_reasoning, stop = self._read(completion, sampling, plan, request)
        try:
            turn = self.tree.commit(plan, completion, answer, in_reasoning=in_reasoning)
        except ReplyRefused as err:
            self.counts["orphaned_tokens.refused"] += len(completion.token_ids)
            log.warning("an answer was refused", episode=self.id, error=str(err))
            raise RequestRefused(500, "answer_refused", str(err)) from None
        turn.stop_sequence = stop
        turn.tools_key, turn.declared = plan.found.root if request.tools else b"", request.conversation
        self.counts["unparsed_calls"] += answer.unparsed_calls
        if plan.fork:
            self.counts[f"forks.{plan.fork}"] += 1
        return turn

    def _check_limits(self) -> None:
        if len(self.tree.turns) + self._num_running >= self._limits.max_turns:
            raise invalid(f"episode {self.id} has had its {self._limits.max_turns} answers: end it", code="max_turns")
        if self._num_running >= self._limits.max_running:
            raise RequestRefused(
                429, "too_many_requests", f"{self._num_running} requests of episode {self.id} are running: wait for one"
            )

    async def _plan(self, request: AgentRequest, roots: SeenRoots | None = None) -> PromptPlan:
        planner = self._model.planner
        try:
            messages, processor = await self._admitted(request.messages)
            match = self.tree.find(root_key(request.tools), messages)
            new = match.messages[match.num_matched if match.base is not None else 0 :]
            arguments = (self.tree, self._roots if roots is None else roots, match, request.tools, processor)
            if sum(len(message.content) for message in new) > _CHARACTERS_ON_THE_LOOP:
                # Turns that are committed meanwhile are only added: the turn of the plan does not change.
                return await asyncio.to_thread(planner.plan, *arguments)
            return planner.plan(*arguments)
        except MalformedData as err:
            raise invalid(str(err), "messages", code="template_refused") from None
        except ImageRefused as err:
            raise invalid(str(err), "messages", code="image_refused") from None

    async def _admitted(self, messages: Sequence[Message]) -> tuple[Sequence[Message], ImageProcessor | None]:
        if not (num_images := sum(len(message.images) for message in messages)):
            return messages, None
        if self._images is None:
            raise ImageRefused(f"{num_images} images, and this episode has nowhere to store them")
        if num_images > MAX_IMAGES:
            raise ImageRefused(f"{num_images} images in the messages, a row may have {MAX_IMAGES}")
        processor = await self._images.processor()
        admitted: list[Message] = []
        for message in messages:
            parts = [part if isinstance(part, str) else await self._images.admit(part) for part in message.parts]
            admitted.append(replace(message, parts=tuple(parts)) if parts else message)
        return admitted, processor

    async def _prompt(self, plan: PromptPlan) -> Sequence[int]:
        token_ids = plan.prompt_ids.tolist()
        if plan.images is None:
            return token_ids
        assert self._images is not None  # else its images were refused
        try:
            data = {ref.sha256: await self._images.read(ref) for ref in plan.images.refs}
        except (ImageRefused, BlobError) as err:
            raise RequestRefused(500, "image_lost", f"an image of the episode cannot be read again: {err}") from None
        return ImagePrompt(token_ids, plan.images, data)

    def _sampling_of(self, request: AgentRequest, prompt_tokens: int) -> Sampling:
        sampling, context = self._sampling, self._model.context_tokens
        room = sampling.max_new_tokens if context is None else context - prompt_tokens
        if room < 1:
            said = f"the messages have {prompt_tokens} tokens, and the model's context is {context}: shorten them"
            raise invalid(said, "messages", code="context_length_exceeded")
        max_new = min(sampling.max_new_tokens, room, request.max_tokens or sampling.max_new_tokens)
        if self.tree.num_stored_tokens + prompt_tokens + max_new > self._limits.max_stored_tokens:
            held = f"{self.tree.num_stored_tokens} tokens of at most {self._limits.max_stored_tokens}"
            raise invalid(f"episode {self.id} holds {held}: end it", code="max_stored_tokens")
        stop = tuple(dict.fromkeys((*sampling.stop, *request.stop)))
        if len(stop) > _MAX_STOP_STRINGS:
            raise invalid(f"{len(stop)} stop strings, at most {_MAX_STOP_STRINGS} with the task's own", "stop")
        ends = tuple(sorted({*sampling.stop_token_ids, *self._model.planner.stop_token_ids}))
        return sampling.model_copy(update={"max_new_tokens": max_new, "stop": stop, "stop_token_ids": ends})

    async def _timed_completion(self, plan: PromptPlan, sampling: Sampling, number: int) -> Completion:
        self.clock.begin(number, sampling.max_new_tokens)
        try:
            completion = await self._completion(plan, sampling)
        except BaseException as err:
            if isinstance(err, asyncio.CancelledError):
                self._note_stall(number)
            self.clock.end(number, None, has_failed=isinstance(err, Exception))
            raise
        self.clock.end(number, len(completion.token_ids))
        return completion

    async def _completion(self, plan: PromptPlan, sampling: Sampling) -> Completion:
        try:
            async with asyncio.timeout(self._limits.answer_deadline_s):
                prompts = [await self._prompt(plan)]
                self._num_sampled += 1
                seeds = {} if self._seed is None else {"seeds": [derived_seed(self._seed, self._num_sampled)]}
                ((completion,),) = await self._sampler.generate(prompts, sampling, 1, **seeds)
        except (TimeoutError, EngineTimeout):
            self.counts["engine_errors"] += 1
            raise RequestRefused(
                504, "engine_timeout", f"the engine gave no answer within {self._limits.answer_deadline_s:g} s: retry"
            ) from None
        except TaskRefused as err:
            raise invalid(str(err), "messages", code=err.reason) from None
        except EngineError as err:
            self.counts["engine_errors"] += 1
            raise RequestRefused(503, "engine_error", f"the engine failed: {err}; retry") from None
        return completion

    def _read(
        self, completion: Completion, sampling: Sampling, plan: PromptPlan, request: AgentRequest
    ) -> tuple[Message, bool, str | None]:
        """Return an answer, whether it was cut in its reasoning, and which of the client's stop strings ended it."""
        ids = completion.token_ids
        ends = ids[-1] in sampling.stop_token_ids
        text = self._model.planner.renderer.text_of(ids[:-1] if ends else ids)
        stopped: str | None = None
        for stop in sampling.stop:
            text, matched, _ = text.partition(stop)
            stopped = matched or stopped
        form = self._model.answer_format
        reasoning, rest, is_open = form.split(text, opened=plan.opens_reasoning)
        stopped = stopped if stopped in request.stop else None
        if not (request.reads_calls and request.tools):
            return Message("assistant", rest, reasoning), is_open, stopped
        parsed = form.parsed(rest, request.tools)
        calls = tuple(ToolCall(call.id or form.new_call_id(), call.name, call.arguments) for call in parsed.calls)
        answer = Message("assistant", parsed.content, reasoning, calls, unparsed_calls=parsed.num_unparsed)
        return answer, is_open, stopped


def episode_ended(episode_id: str) -> RequestRefused:
    return RequestRefused(404, "episode_ended", f"episode {episode_id} has ended: nothing more is sampled for it")


class AgentProxy:
    def __init__(self, limits: EpisodeLimits, images: RunImages | None = None) -> None:
        """Start without episodes; ``images`` stores those of their messages, None: they are refused."""
        self.limits = limits
        self._images = images
        self._open: dict[str, EpisodeSession] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()

    def begin(
        self, episode_id: str, model: AgentModel, sampler: Samples, sampling: Sampling, seed: int | None = None
    ) -> EpisodeSession:
        """Begin an episode; `path` is what its agent needs. Without a ``seed`` answers are random."""
        episode = EpisodeSession(episode_id, model, sampler, sampling, self.limits, seed, self._images)
        self._open[episode.secret] = episode
        return episode

    def end(self, episode: EpisodeSession) -> TreeRows:
        self._open.pop(episode.secret, None)
        self._ended[episode.secret] = episode.id
        while len(self._ended) > _ENDED_KEPT:
            self._ended.popitem(last=False)
        return episode.end()

    def find(self, secret: str) -> EpisodeSession:
        episode = self._open.get(secret)
        if episode is not None:
            return episode
        ended = self._ended.get(secret)
        if ended is not None:
            raise episode_ended(ended)
        raise RequestRefused(401, "invalid_api_key", "no episode has the secret of this URL")


def path(episode: EpisodeSession) -> str:
    return f"/episodes/{episode.secret}/v1"
