"""What `penstock quickstart` trains: the data of each task, a tiny model, and the settings under which it learns the task.

``sort``, sorting eight digits: 10^8 problems, exact-match reward, learnable from scratch in about a minute on one core. A problem
is held out when ``crc32(digits) % 10 == 0``: it is never seen in the warm-up nor in the reinforcement learning, so held-out
accuracy measures sorting, not memory. The files are ordinary ones, read by the ordinary data path; the model is an ordinary
Hugging Face folder of the Qwen3 architecture with 126,848 parameters and a character-level tokenizer.

``tools`` asks a question whose answer has to be looked up. ``get 37`` is answered right by asking (``?37``), reading the
reply of the environment ``lookup`` (two digits, which differ between groups), and repeating it: two turns, and nothing to
memorise. In the examples of the warm-up each turn is right half of the time, so that about one episode in twenty succeeds when
the reinforcement learning begins.

``lake`` is the game ``frozen_lake`` on four by four fields, at least six moves. In the examples half of the moves are those of a
shortest way and half are random. Its model has a longer context and the characters of the fields.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

Row = dict[str, Any]
NUM_DIGITS = 8
MAX_NEW_TOKENS = NUM_DIGITS + 1  # the digits and the end of turn

_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_ROLES = ("system", "user", "assistant")
_CHARACTERS = "\n abcdefghijklmnopqrstuvwxyz0123456789.,:;?!+-*/="
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_HEADS = 4
_KV_HEADS = 2
_HEAD_DIM = 32
NUM_KEYS = 100
TOOLS_MAX_NEW_TOKENS = 5  # "?37" or two digits, and the end of turn
_TOOLS_RIGHT = 0.5  # share of the examples' turns
_LAKE_QUESTION = "walk"
_LAKE_RIGHT = 0.5  # share of the examples' moves that are those of a shortest way; the others are random
_LAKE_MAX_TURNS = 12


@dataclass(frozen=True, slots=True)
class Shape:
    """What differs between the tiny models; the defaults are those of `penstock quickstart`."""

    hidden: int = 64
    layers: int = 2
    intermediate: int = 192
    context: int = 128
    characters: str = _CHARACTERS

    @property
    def words(self) -> tuple[str, ...]:
        """The vocabulary, in the order of its ids."""
        return (*_SPECIALS, *_ROLES, *self.characters)


TINY = Shape()
TEACHER_SHAPE = Shape(hidden=128, layers=4, intermediate=384)


def is_held_out(digits: str) -> bool:
    return zlib.crc32(digits.encode()) % 10 == 0


def problems(seed: int, *, held_out: bool) -> Iterator[str]:
    """Yield distinct random problems of one side of the split, without end; the same for the same seed."""
    rng = np.random.default_rng([seed, int(held_out)])
    seen: set[str] = set()
    while True:
        for number in rng.integers(0, 10**NUM_DIGITS, size=4096):
            digits = f"{number:0{NUM_DIGITS}d}"
            if is_held_out(digits) == held_out and digits not in seen:
                seen.add(digits)
                yield digits


def write_data(folder: Path, *, seed: int, num_sft: int, num_train: int, num_eval: int) -> None:
    """Write ``sft.jsonl``, ``train.jsonl`` and ``eval.jsonl``; warm-up and training share no problem."""
    seen = problems(seed, held_out=False)
    unseen = problems(0, held_out=True)  # the same for every seed, so that runs can be compared
    write_files(
        folder,
        sft=(chat_row(f"sort {digits}", _answer(digits)) for digits in itertools.islice(seen, num_sft)),
        train=map(_sort_row, itertools.islice(seen, num_train)),
        held_out=map(_sort_row, itertools.islice(unseen, num_eval)),
    )


def _answer(digits: str) -> str:
    return "".join(sorted(digits))


def _sort_row(digits: str) -> Row:
    return prompt_row(f"sort {digits}", "sort_digits", _answer(digits))


def prompt_row(question: str, data_source: str, ground_truth: str | None = None) -> Row:
    truth = {} if ground_truth is None else {"ground_truth": ground_truth}
    return {"prompt": [{"role": "user", "content": question}], **truth, "data_source": data_source}


def chat_row(*texts: str) -> Row:
    """Return a conversation whose texts are the user's and the model's in turn."""
    return {"messages": [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(texts)]}


def write_files(folder: Path, *, sft: Iterable[Row], train: Iterable[Row], held_out: Iterable[Row]) -> None:
    """Write ``sft.jsonl``, ``train.jsonl`` and ``eval.jsonl``, in this order."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("sft", sft), ("train", train), ("eval", held_out)):
        write_rows(folder / f"{name}.jsonl", rows)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_model(folder: Path, *, seed: int, shape: Shape = TINY) -> int:
    """Write a randomly initialised Qwen3 model folder; returns its number of parameters.

    Initialised as transformers does (normal with standard deviation 0.02, norms at one), but in
    numpy: the command that calls this has no reason to load torch.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder, shape)
    eos = _SPECIALS.index("<|im_end|>")
    pad = _SPECIALS.index("<|endoftext|>")
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": len(shape.words),
        "hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers,
        "num_attention_heads": _HEADS, "num_key_value_heads": _KV_HEADS, "head_dim": _HEAD_DIM,
        "max_position_embeddings": shape.context, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "tie_word_embeddings": True, "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02,
        "use_sliding_window": False, "dtype": "float32", "eos_token_id": eos, "pad_token_id": pad, "bos_token_id": None,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos, "pad_token_id": pad}))
    tensors = _random_weights(np.random.default_rng(seed), shape)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.size for tensor in tensors.values())


def _write_tokenizer(folder: Path, shape: Shape) -> None:
    ids = {word: number for number, word in enumerate(shape.words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=_SPECIALS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join((*_ROLES, r"[\s\S]"))), behavior="isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(list(_SPECIALS))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>", "model_max_length": shape.context, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)


def _random_weights(rng: np.random.Generator, shape: Shape) -> dict[str, np.ndarray]:
    hidden = shape.hidden

    def normal(*size: int) -> np.ndarray:
        return rng.normal(0.0, 0.02, size=size).astype(np.float32)

    def ones(size: int) -> np.ndarray:
        return np.ones(size, dtype=np.float32)

    tensors = {"model.embed_tokens.weight": normal(len(shape.words), hidden), "model.norm.weight": ones(hidden)}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": ones(hidden),
            f"{prefix}.post_attention_layernorm.weight": ones(hidden),
            f"{prefix}.self_attn.q_proj.weight": normal(_HEADS * _HEAD_DIM, hidden),
            f"{prefix}.self_attn.k_proj.weight": normal(_KV_HEADS * _HEAD_DIM, hidden),
            f"{prefix}.self_attn.v_proj.weight": normal(_KV_HEADS * _HEAD_DIM, hidden),
            f"{prefix}.self_attn.o_proj.weight": normal(hidden, _HEADS * _HEAD_DIM),
            f"{prefix}.self_attn.q_norm.weight": ones(_HEAD_DIM),
            f"{prefix}.self_attn.k_norm.weight": ones(_HEAD_DIM),
            f"{prefix}.mlp.gate_proj.weight": normal(shape.intermediate, hidden),
            f"{prefix}.mlp.up_proj.weight": normal(shape.intermediate, hidden),
            f"{prefix}.mlp.down_proj.weight": normal(hidden, shape.intermediate),
        }
    return tensors


def write_tools_data(folder: Path, *, seed: int, num_sft: int, num_train: int, num_eval: int) -> None:
    """Write ``sft.jsonl``, ``train.jsonl`` and ``eval.jsonl``; what a key's value is follows from a group's seed, not from these."""
    rng = np.random.default_rng([seed, 2])
    examples = [_tools_example(rng) for _ in range(num_sft)]  # before the keys: both are drawn from one generator
    keys = rng.integers(NUM_KEYS, size=num_train)
    held_out = (number % NUM_KEYS for number in range(num_eval))
    write_files(folder, sft=examples, train=map(_tools_prompt, keys), held_out=map(_tools_prompt, held_out))


def _tools_prompt(key: int) -> Row:
    return prompt_row(f"get {key:02d}", "lookup")


def _tools_example(rng: np.random.Generator) -> Row:
    key, asked, value, said = (int(number) for number in rng.integers(NUM_KEYS, size=4))
    if rng.random() < _TOOLS_RIGHT:
        asked = key
    if rng.random() < _TOOLS_RIGHT:
        said = value
    return chat_row(f"get {key:02d}", f"?{asked:02d}", f"{value:02d}", f"{said:02d}")


def write_lake_data(folder: Path, *, seed: int, num_sft: int, num_train: int, num_eval: int) -> None:
    """Write ``sft.jsonl``, ``train.jsonl`` and ``eval.jsonl``; where the holes are follows from a group's seed, not from these."""
    rng = np.random.default_rng([seed, 3])
    row = prompt_row(_LAKE_QUESTION, "frozen_lake")
    examples = (_lake_example(rng) for _ in range(num_sft))
    write_files(folder, sft=examples, train=itertools.repeat(row, num_train), held_out=itertools.repeat(row, num_eval))


def _lake_example(rng: np.random.Generator) -> Row:
    # Imported here: no other task needs the agents.
    from penstock.agents.environments.games.actions import DIRECTIONS  # noqa: PLC0415
    from penstock.agents.environments.games.frozen_lake import FrozenLakeOptions, FrozenLakePlay  # noqa: PLC0415
    from penstock.agents.environments.play import Row as PlayedRow  # noqa: PLC0415
    from penstock.agents.proxy.messages import Message  # noqa: PLC0415

    row = PlayedRow((Message("user", _LAKE_QUESTION),), None, {}, "frozen_lake")
    play = FrozenLakePlay(int(rng.integers(2**31)), row, FrozenLakeOptions(instructions="row"))  # pyright: ignore[reportCallIssue]
    texts = [play.start()[-1].content]
    while len(texts) < 2 * _LAKE_MAX_TURNS:
        move = play.shortest_path()[0] if rng.random() < _LAKE_RIGHT else str(rng.choice([*DIRECTIONS]))
        reply = play.step(Message("assistant", move[0]))
        texts.append(move[0])
        if reply.is_done:
            break
        texts.append(reply.messages[-1].content)
    return chat_row(*texts)


@dataclass(frozen=True, slots=True)
class QuickstartTask:
    name: str
    does: str  # what the model learns, for people
    question: str  # a prompt to try afterwards
    write_data: Callable[..., None]
    steps: int
    groups_per_step: int
    group_size: int
    groups_per_message: int
    max_new_tokens: int
    lr: float
    num_eval: int
    sft_steps: int
    sft_batch: int
    sft_lr: float
    sft_warmup_steps: int
    reward: str
    rollout: str = ""
    eval: str = ""
    algorithm: str = 'name = "async_grpo"         # the default: GRPO that learns from samples of older versions, see docs/algorithms.md'
    sections: str = ""  # of the run file, beside those of every task
    shape: Shape = TINY
    learnt: str = "accuracy"  # what the share of right answers is called


SORT = QuickstartTask(
    name="sort",
    does=f"sort {NUM_DIGITS} digits",
    question="sort 31415926",
    write_data=write_data,
    steps=150,
    groups_per_step=48,
    group_size=8,
    groups_per_message=12,
    max_new_tokens=MAX_NEW_TOKENS,
    lr=5e-4,
    num_eval=500,
    sft_steps=60,
    sft_batch=128,
    sft_lr=3e-3,
    sft_warmup_steps=20,
    reward='name = "exact_match"',
)
TOOLS = QuickstartTask(
    name="tools",
    does="ask for what it is asked, in two turns",
    question="get 37",
    write_data=write_tools_data,
    steps=120,
    groups_per_step=24,
    group_size=8,
    groups_per_message=6,
    max_new_tokens=TOOLS_MAX_NEW_TOKENS,
    lr=1e-3,
    num_eval=200,
    sft_steps=200,
    sft_batch=128,
    sft_lr=1.5e-3,
    sft_warmup_steps=40,
    rollout='environment = "lookup"      # an episode of several turns for each sample, see docs/environments.md\n',
    reward='name = "environment"        # what the environment gives\nsuccess = { environment = 1.0 }',
    eval="temperature = 1.0           # as it is trained: its most likely answer is right long before\n",
    learnt="success",
)
LAKE = replace(
    TOOLS,
    name="lake",
    does="walk over ice to the goal and into no hole",
    question=_LAKE_QUESTION,
    write_data=write_lake_data,
    max_new_tokens=3,
    sft_batch=64,
    rollout='environment = "lake"\n',
    sections=f"""
[environment.define.lake]
type = "frozen_lake"        # four by four fields; where the holes are follows from the group's seed
options = {{ instructions = "row" }}
max_turns = {_LAKE_MAX_TURNS}
""",
    shape=Shape(context=512, characters=_CHARACTERS + "PGO_"),
)
TASKS = {task.name: task for task in (SORT, TOOLS)}
