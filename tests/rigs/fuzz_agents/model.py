"""The model of the fuzzer: random weights, and a vocabulary in which whole tool calls are single tokens, so that it makes some."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.agents.proxy.agent_model import TEMPLATES, logprobs_of, tokenizer_json, write_model
from tests.contracts.tiny_model import build_model
from tests.rigs.fuzz_agents.agent import SIDE
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedModel

from penstock.agents.proxy.rows import TreeRow, TreeRows, counts_of, messages_json, stored_rows
from penstock.agents.proxy.session import EpisodeSession
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.episode import Episode
from penstock.protocol.errors import PackError
from penstock.protocol.groups import Sampling
from penstock.protocol.versions import PolicyVersion, VersionRun
from penstock.rollout_service.embedded_engine import sequence as engine_sequence
from penstock.rollout_service.embedded_engine.engine_thread import EngineThread
from penstock.rollout_service.embedded_engine.model.kv_cache import KVCache
from penstock.rollout_service.embedded_engine.model.model_config import read_model_config
from penstock.rollout_service.embedded_engine.model.transformer import Transformer
from penstock.rollout_service.embedded_engine.model.weights import prepare_weights, read_checkpoint
from penstock.rollout_service.embedded_engine.runner import Runner
from penstock.rollout_service.embedded_engine.scheduler import Limits
from penstock.rollout_service.engines.completion import Completion

TOLERANCE = 1e-5
_LONGEST_ANSWER = 64
_JUDGED_AT_ONCE = 16


@dataclass(slots=True)
class Findings:
    problems: list[str] = field(default_factory=list)
    rows: int = 0
    trained_tokens: int = 0
    worst_logprob: float = 0.0


def check_episode(episode: EpisodeSession, made: TreeRows, recorded: Recorded, engine: Any, findings: Findings) -> None:
    num_trained = 0
    trained = [row.trajectory for row in made.rows if row.trajectory.loss_mask.any()]
    judged = iter(engine.check([(one.token_ids, one.loss_mask) for one in trained]))
    for number, row in enumerate(made.rows):
        where = f"episode {episode.id} row {number}"
        findings.rows += 1
        for start, end in _stretches(row.trajectory.loss_mask):
            sampled = _record_of(row, start, end, recorded)
            if sampled is None:
                findings.problems.append(
                    f"{where}: tokens {start} to {end} are trained and were not sampled after this prompt"
                )
                continue
            offset = start - len(sampled.prompt)
            if offset < sampled.num_trained:
                findings.problems.append(f"{where}: tokens {start} to {end} are trained twice")
            sampled.num_trained = offset + end - start
            num_trained += end - start
        if row.trajectory.behaviour_logprobs[~row.trajectory.loss_mask].any():
            findings.problems.append(f"{where}: tokens of the context have log-probabilities")
        if row.trajectory.loss_mask.any():
            worst = float(np.abs(next(judged) - row.trajectory.behaviour_logprobs[row.trajectory.loss_mask]).max())
            findings.worst_logprob = max(findings.worst_logprob, worst)
            if not worst <= TOLERANCE:
                findings.problems.append(
                    f"{where}: a log-probability is {worst:.2g} from that of a forward over the row"
                )
    orphaned = (made.orphaned_tokens + episode.orphaned_tokens).total()
    if num_trained + orphaned != recorded.num_tokens:
        findings.problems.append(
            f"episode {episode.id}: {num_trained} tokens trained and {orphaned} orphaned of {recorded.num_tokens} sampled"
        )
    findings.trained_tokens += num_trained
    try:
        store(episode, made)
    except PackError as err:
        findings.problems.append(f"episode {episode.id} cannot be stored: {err}")


def scores_aside(episode: EpisodeSession, made: TreeRows) -> bool:
    """Return True if the scored answer is one of a side request, and another is trained."""
    asked = {
        span.turn: episode.tree.turns[span.turn].new_messages[-1].content for row in made.rows for span in row.spans
    }
    aside = {turn for turn, content in asked.items() if content.startswith(SIDE)}
    return made.scored in aside and len(aside) < len(asked)


def store(episode: EpisodeSession, made: TreeRows) -> Episode:
    """Return an episode as packs store it; raises PackError for rows that contradict each other."""
    return Episode(
        episode_id=episode.id, group_id="g", index=0, environment="agent", environment_version="", seed=0,
        status="done" if made.rows else "failed", rows=stored_rows(made, episode.tree.turns),
        messages=messages_json(episode.messages), counts=counts_of(episode.counts, made),
    )  # fmt: skip


def _stretches(mask: np.ndarray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return [(int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def _record_of(row: TreeRow, start: int, end: int, recorded: Recorded) -> Sampled | None:
    """Return the answer that these tokens are of; its prompt is everything before it in the row.

    Of several that begin alike, the shortest: a longer one is another row's.
    """
    ids = row.trajectory.token_ids
    for begin in range(start, max(-1, start - _LONGEST_ANSWER), -1):
        for sampled in sorted(recorded.by_prompt.get(ids[:begin].tobytes(), ()), key=lambda one: len(one.token_ids)):
            offset = start - begin
            same = sampled.token_ids[: end - begin] == ids[begin:end].tolist()
            logprobs = np.asarray(sampled.logprobs[offset : end - begin], dtype=np.float32)
            if (
                same
                and sampled.num_trained <= offset
                and np.array_equal(logprobs, row.trajectory.behaviour_logprobs[start:end])
            ):
                return sampled
    return None


VOCAB = 448
_KEPT_TOKENS = 4000  # of about thirty episodes at once: some of what is kept is evicted, and computed again
PHRASES = [
    '<tool_call>\n{"name": "look", "arguments": {"word": "sun", "times": 2}}\n</tool_call>',
    '<tool_call>{"arguments":{"times":1e3,"word":"m\\u006fon"},"name":"look"}</tool_call>',
    '<tool_call>\n{"name": "look", "arguments": {"times": 1, "times": 2}}\n</tool_call>',
    '<tool_call>\n{"name": "look", "arguments": {"on": false, "x": 1.50}}\n\n</tool_call>',
    '<tool_call>\n{"name": "look", "arguments": {"word": }\n</tool_call>',
    "<tool_call>\n<function=look>\n<parameter=word>\nsun\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>look\n<arg_key>word</arg_key>\n<arg_value>sun</arg_value>\n</tool_call>",
    '<minimax:tool_call>\n<invoke name="look">\n<parameter name="word">sun</parameter>\n</invoke>\n</minimax:tool_call>',
    '[TOOL_CALLS][{"name": "look", "arguments": {"word": "sun"}}]',
    '<|tool_call|>[{"name": "look", "arguments": {"word": "sun"}}]',
    '{"name": "look", "parameters": {"word": "sun"}}',
    '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"word": "sun"}<|call|>',
    "<think>\nhm\n</think>\n\n",
    "<think>\nhm",
    "\n\n",
    "  ",
]


def write_fuzz_model(folder: Path, template: str) -> ChatTokenizer:
    write_model(folder, TEMPLATES[template])
    tokenizer = Tokenizer.from_str(tokenizer_json())
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one in PHRASES])
    assert tokenizer.get_vocab_size() <= VOCAB
    tokenizer.save(str(folder / "tokenizer.json"))
    return ChatTokenizer.read(folder)


@dataclass(slots=True)
class Sampled:
    prompt: np.ndarray
    token_ids: list[int]
    logprobs: list[float]
    num_trained: int = 0


@dataclass(slots=True)
class Recorded:
    """Everything that an episode's engine returned: the fuzzer's own record."""

    by_prompt: dict[bytes, list[Sampled]] = field(default_factory=dict)
    num_tokens: int = 0

    def add(self, prompt: Sequence[int], token_ids: list[int], logprobs: list[float]) -> None:
        ids = np.asarray(prompt, dtype=np.int32)
        self.by_prompt.setdefault(ids.tobytes(), []).append(Sampled(ids, token_ids, logprobs))
        self.num_tokens += len(token_ids)


class FunctionEngine:
    """Random tokens, and a function of a token and all before it as its log-probability."""

    def __init__(self, tokenizer: ChatTokenizer, seed: int) -> None:
        """Prepare; the phrases are as likely as all other tokens."""
        self._random = random.Random(seed)
        self._eos = tokenizer.eos_ids
        added = tokenizer.added_tokens()
        self._phrases = [added[phrase] for phrase in PHRASES]

    async def sample(self, prompt: Sequence[int], sampling: Sampling) -> tuple[list[int], list[float], str]:
        """Return ids, log-probabilities and the reason of the end."""
        draw = self._random
        await asyncio.sleep(0 if draw.random() < 0.8 else 0.001)
        count = draw.randrange(1, min(12, sampling.max_new_tokens) + 1)
        ids = [draw.choice(self._phrases) if draw.random() < 0.15 else draw.randrange(6, 420) for _ in range(count)]
        if draw.random() < 0.8:
            ids[-1] = draw.choice(self._eos) if draw.random() < 0.1 else self._eos[0]
        ids = next((ids[: n + 1] for n, one in enumerate(ids) if one in sampling.stop_token_ids), ids)
        finish = "stop" if ids[-1] in sampling.stop_token_ids else "length"
        return ids, logprobs_of(list(prompt), ids), finish

    def check(self, rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
        """Return the log-probabilities of each row's trained tokens, computed from its ids and loss mask."""
        lists = [(ids.tolist(), np.flatnonzero(mask)) for ids, mask in rows]
        return [np.asarray([logprobs_of(ids[:n], [ids[n]])[0] for n in at]) for ids, at in lists]

    def stop(self) -> None:
        """Nothing runs."""


class EmbeddedEngine:
    """The embedded engine with random weights, in this process; the judge is transformers' forward over the row."""

    def __init__(self, folder: Path, seed: int) -> None:
        weights = folder / "weights"
        self._judge: PreTrainedModel = build_model(weights, "qwen3", seed=seed, vocab_size=VOCAB, eos_token_id=None)
        config = read_model_config(weights)
        device = torch.device("cpu")
        limits = Limits(max_running=64, max_total_tokens=64 * 4096, max_prefill_tokens=8192)
        with torch.inference_mode():
            prepared = prepare_weights(config, read_checkpoint(weights, config), device=device, dtype=torch.float32)
            cache = KVCache(config, max_tokens=limits.max_total_tokens, device=device, dtype=torch.float32)
            model = Transformer(config, device=device, dtype=torch.float32)
            runner = Runner(
                model, prepared, cache, max_running=64, find_stop_string=lambda _: None, max_kept_tokens=_KEPT_TOKENS
            )
        self._thread = EngineThread(runner, limits, version="3", model_path="", on_failure=lambda: None)
        self._thread.start()
        self._random = random.Random(seed)

    async def sample(self, prompt: Sequence[int], sampling: Sampling) -> tuple[list[int], list[float], str]:
        """Return ids, log-probabilities and the reason of the end."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        asked = engine_sequence.Sampling(
            max_new_tokens=min(sampling.max_new_tokens, self._random.randrange(1, 16)),
            seed=self._random.getrandbits(64),
            stop_token_ids=sampling.stop_token_ids,
        )
        one = engine_sequence.Sequence("", tuple(prompt), asked)

        def on_done(error: Exception | None) -> None:
            end = done.set_result if error is None else done.set_exception
            loop.call_soon_threadsafe(lambda: done.done() or end(error))  # pyright: ignore[reportArgumentType]

        self._thread.submit(engine_sequence.Job([one], on_done))
        await done
        assert one.finish is not None
        return list(one.output_ids), list(one.output_logprobs), one.finish.type

    def check(self, rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
        """Return the log-probabilities of each row's trained tokens, computed from its ids and loss mask, a few rows at once."""
        judged: list[np.ndarray] = []
        for start in range(0, len(rows), _JUDGED_AT_ONCE):
            some = rows[start : start + _JUDGED_AT_ONCE]
            ids = torch.zeros(len(some), max(len(one) for one, _ in some), dtype=torch.int64)  # padded behind each row
            for number, (one, _) in enumerate(some):
                ids[number, : len(one)] = torch.from_numpy(one)
            with torch.inference_mode():
                logits = self._judge(ids, use_cache=False).logits
            for number, (_, mask) in enumerate(some):
                at = torch.from_numpy(np.flatnonzero(mask))
                table = logits[number, at - 1].double().log_softmax(-1)
                judged.append(table.gather(-1, ids[number, at, None])[:, 0].numpy())
        return judged

    def figures(self) -> dict[str, int]:
        """Return how many prompt tokens came, were known, and had to make room."""
        metrics = self._thread.metrics
        return {
            "prompt_tokens": metrics.prompt_tokens,
            "cached_tokens": metrics.cached_tokens,
            "evicted_tokens": self._thread.num_evicted_tokens,
        }

    def stop(self) -> None:
        self._thread.stop()


@dataclass(frozen=True, slots=True)
class RecordingSampler:
    engine: Any
    recorded: Recorded

    async def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, n: int) -> list[list[Completion]]:
        assert n == 1
        (prompt,) = prompts
        ids, logprobs, finish = await self.engine.sample(prompt, sampling)
        self.recorded.add(prompt, ids, logprobs)
        return [[Completion(ids, logprobs, (VersionRun(PolicyVersion(3), 0, len(ids)),), finish, "")]]
