"""A tokenizer with control tokens, chat templates of several families, and engines for tests of agents."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from penstock.agents.proxy.plan_prompt import Thinking
from penstock.agents.proxy.session import AgentModel, AgentProxy, EpisodeLimits, EpisodeSession
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.groups import RouterShape, Sampling
from penstock.protocol.token_annotations import ExpertChoices, dtype_of
from penstock.protocol.versions import PolicyVersion, VersionRun
from penstock.rollout_service.engines.completion import Completion

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|observation|>", "<|assistant|>"]
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]

# As SmolLM2's: appends, knows neither tools nor reasoning.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TOOLS_HEAD = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}"
    "{{- '# Tools' }}{%- for tool in tools %}{{- '\n' + tool | tojson }}{%- endfor %}{{- '<|im_end|>\n' }}"
    "{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}"
)
_CALLS = (
    "{%- for call in message.tool_calls or [] %}{%- if not loop.first or message.content %}{{- '\n' }}{%- endif %}"
    '{{- \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{%- if call.function.arguments is string %}{{- call.function.arguments }}{%- else %}{{- call.function.arguments | tojson }}"
    "{%- endif %}{{- '}\n</tool_call>' }}{%- endfor %}"
)
_RESULT = (
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"
)
# As Qwen2.5's: appends; never shows reasoning.
QWEN25 = (
    _TOOLS_HEAD
    + "{%- for message in messages %}{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\n' + message.content }}"
    + _CALLS
    + "{{- '<|im_end|>\n' }}"
    "{%- elif message.role == 'tool' %}" + _RESULT + "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# As Qwen3's: strips reasoning before the last user message, and writes an empty one where there is none.
QWEN3 = (
    _TOOLS_HEAD + "{%- set ns = namespace(last=0) %}{%- for message in messages %}{%- if message.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.last and (loop.last or message.reasoning_content) %}"
    "{{- '<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n' }}{%- endif %}{{- message.content }}"
    + _CALLS
    + "{{- '<|im_end|>\n' }}{%- elif message.role == 'tool' %}"
    + _RESULT
    + "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)
# As DeepSeek-R1's: the prompt opens the reasoning.
OPENS_THINK = QWEN3.replace(
    "{{- '<|im_start|>assistant\n' }}{%- if enable_thinking",
    "{{- '<|im_start|>assistant\n<think>\n' }}{%- if enable_thinking",
)
# Rewrites earlier calls: keys sorted, values as text, as templates do that write parameters one by one.
REWRITES = QWEN25.replace(
    "{{- call.function.arguments | tojson }}",
    "{{- '{' }}{%- for key, value in call.function.arguments | dictsort %}{{- key + '=' + value | string + ';' }}{%- endfor %}{{- '}' }}",
)
# As GLM's: an answer has no closing; its stop token is the opening of the next role.
GLM = (
    "{%- for message in messages %}{%- if message.role == 'tool' %}{{- '<|observation|>\n' + message.content }}"
    "{%- else %}{{- '<|' + message.role + '|>\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}{{- '<tool_call>' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson + '</tool_call>' }}"
    "{%- endfor %}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}"
)
# As Llama 3's: a call replaces the content.
LLAMA = (
    "{%- for message in messages %}{{- '<|im_start|>' + ('ipython' if message.role == 'tool' else message.role) + '\n\n' }}"
    "{%- if message.tool_calls %}{%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}"
    "{%- set call = message.tool_calls[0].function %}{{- '{\"name\": \"' + call.name + '\", \"parameters\": ' + call.arguments | tojson + '}' }}"
    "{%- else %}{{- message.content | trim }}{%- endif %}{{- '<|im_end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n\n' }}{%- endif %}"
)
# Writes every earlier answer a second time, so there is no bridge.
REPEATS = QWEN25.replace(
    "{%- if add_generation_prompt %}",
    "{%- if add_generation_prompt %}{%- for message in messages %}{%- if message.role == 'assistant' %}"
    "{{- 'said: ' + message.content + '\n' }}{%- endif %}{%- endfor %}",
)
TEMPLATES = {
    "repeats": REPEATS, "smollm2": SMOLLM2, "qwen25": QWEN25, "qwen3": QWEN3, "opens_think": OPENS_THINK,
    "rewrites": REWRITES, "glm": GLM, "llama": LLAMA,
}  # fmt: skip


@lru_cache(maxsize=1)
def tokenizer_json() -> str:
    """Return a byte-level tokenizer that merges common words, so that a text has many splits."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = (
        'hello world the answer is 12 {"name": "look", "arguments": {"word": "sun", "times": 2}} assistant user system'
    )
    tokenizer.train_from_iterator([words] * 3, trainer)
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one in ADDED])
    return tokenizer.to_str()


def write_model(folder: Path, template: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json())
    (folder / "chat_template.jinja").write_text(template)
    end = ["<|user|>", "<|observation|>"] if "<|observation|>" in template else ["<|im_end|>", "<|endoftext|>"]
    vocabulary = json.loads(tokenizer_json())
    ids = {one["content"]: one["id"] for one in vocabulary["added_tokens"]}
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end[0]}))
    (folder / "config.json").write_text(
        json.dumps({"eos_token_id": [ids[one] for one in end], "vocab_size": 440, "max_position_embeddings": 8192})
    )
    return folder


@dataclass
class Engine:
    """Answers with scripted texts, or random tokens; a token's log-probability is a function of it and all before."""

    tokenizer: ChatTokenizer
    seed: int = 0
    script: list[str | list[int]] = field(default_factory=list)  # texts, encoded, or ids; the next answer first
    version: int = 3
    prompts: list[list[int]] = field(default_factory=list)
    before: Callable[[], Awaitable[object]] | None = None  # awaited before each answer
    other_ends: float = 0.0  # how often an answer ends with another stop token than the template's

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.added = self.tokenizer.added_tokens()

    async def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, n: int) -> list[list[Completion]]:
        ((prompt,), _) = (prompts, n)
        self.prompts.append(list(prompt))
        if self.before is not None:
            await self.before()
        ids = self._ids(sampling)
        ids, finish = ids[: sampling.max_new_tokens], "stop"
        if ids[-1] not in sampling.stop_token_ids:
            finish = "length" if len(ids) == sampling.max_new_tokens else "stop"
        logprobs = logprobs_of(list(prompt), ids)
        middle = self.random.randrange(len(ids) + 1)
        edges = ((self.version, 0, middle), (self.version + 1, middle, len(ids)))
        runs = tuple(VersionRun(PolicyVersion(version), *run) for version, *run in edges if run[0] < run[1])
        shape, number = sampling.routers, len(self.prompts) - 1
        experts = None if shape is None else chosen_by(shape, number, len(prompt) + len(ids) - 1)
        return [[Completion(ids, logprobs, runs, finish, "", experts)]]  # pyright: ignore[reportArgumentType]

    def _ids(self, sampling: Sampling) -> list[int]:
        if self.script:
            answer = self.script.pop(0)
            return self.tokenizer.encode(answer) if isinstance(answer, str) else list(answer)
        count = self.random.randrange(1, 12)
        ids = [self.random.randrange(6, 420) for _ in range(count)]
        if self.random.random() < 0.7:
            ids = [*ids[: sampling.max_new_tokens - 1], self._end(sampling)]
        return ids

    def _end(self, sampling: Sampling) -> int:
        if self.random.random() < self.other_ends:
            return self.random.choice(sampling.stop_token_ids)
        return self.tokenizer.eos_ids[0]


def chosen_by(shape: RouterShape, request: int, num_tokens: int) -> ExpertChoices:
    order = np.random.default_rng(request).random((4096, shape.num_layers, shape.num_experts)).argsort(-1)
    return ExpertChoices(shape, np.sort(order[:num_tokens, :, : shape.top_k], axis=-1).astype(dtype_of(shape)))


def logprobs_of(prompt: list[int], ids: list[int]) -> list[float]:
    """Return log-probabilities that depend on every token before: a changed context changes them."""
    digest = hashlib.blake2b(b"".join(one.to_bytes(4, "little") for one in prompt), digest_size=8)
    found = []
    for one in ids:
        digest.update(one.to_bytes(4, "little"))
        found.append(-(int.from_bytes(digest.digest(), "little") % 1_000_000) / 100_000)
    return found


@dataclass
class Bench:
    proxy: AgentProxy
    model: AgentModel
    engine: Engine
    sampling: Sampling

    def begin(self, episode_id: str = "e1") -> EpisodeSession:
        return self.proxy.begin(episode_id, self.model, self.engine, self.sampling)


_TOKENIZERS: dict[str, ChatTokenizer] = {}


def bench(
    folder: Path, template: str = "qwen25", *, answer_format: str = "hermes", thinking: Thinking = "keep",
    script: Sequence[str | list[int]] = (), max_new_tokens: int = 64, context_tokens: int | None = 8192,
    stop: tuple[str, ...] = (), seed: int = 0, routers: RouterShape | None = None, **limits: object,
) -> Bench:  # fmt: skip
    if template not in _TOKENIZERS:
        _TOKENIZERS[template] = ChatTokenizer.read(write_model(folder / template, TEMPLATES[template]))
    tokenizer = _TOKENIZERS[template]
    model = AgentModel.of(tokenizer, answer_format, context_tokens, thinking)
    sampling = Sampling(max_new_tokens=max_new_tokens, stop=stop, routers=routers)
    engine = Engine(tokenizer, seed=seed, script=list(script))
    return Bench(AgentProxy(EpisodeLimits.model_validate(limits)), model, engine, sampling)
