"""A reward model as a reward that `penstock reward serve-model` serves.

The adapter of torch and transformers returns one number for each text: the logit of a model with one label (what reward
models have), or, with ``label``, the probability of that label. Texts are padded on the right and batched by length; a
text's number does not depend on the other texts of its batch, except for rounding.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from penstock.protocol.chat_template import ChatTemplate
from penstock.protocol.chat_tokenizer import read_json, special_tokens_of, template_text
from penstock.protocol.errors import ConfigError, TemplateRefused, UnsupportedModel
from penstock.protocol.model_folder import check_folder
from penstock.protocol.tokenizer_file import check_tokenizer
from penstock.reward_model.commands import ModelOptions
from penstock.reward_service.endpoints.wire import GroupToScore, Score
from penstock.reward_service.hosting.served_reward import Hosted

Form = Literal["chat", "plain"]
Messages = list[dict[str, str]]
Render = Callable[[Messages], str]
_MAX_CONTEXT = 1_000_000  # tokenizers without a limit report 10**30


class Message(BaseModel):
    """A message of a row's column; other keys are ignored."""

    role: str
    content: str


_QUESTION: TypeAdapter[str | list[Message]] = TypeAdapter(str | Annotated[list[Message], Field(min_length=1)])


class Unusable(ValueError):
    """A row lacks a column that the model needs, or it has another type; the message names it."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The format of the texts.

    Attributes:
        form: ``chat`` renders messages with the model's template, ``plain`` joins prompt and completion.
        render: the model's chat template; not used for ``plain``.
        prompt_column: column of the row that holds the question, as a text or as messages. Empty for the prompt that
            the policy saw, which is already rendered with the policy's template.
    """

    form: Form
    render: Render
    prompt_column: str = ""

    def texts(self, group: GroupToScore) -> list[str]:
        asked = self._asked(group)
        if self.form == "plain":
            if not isinstance(asked, str):
                raise Unusable(
                    f"column {self.prompt_column!r} holds messages, which --form plain cannot join; use --form chat"
                )
            return [asked + text for text in group.completions]
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        return [self.render([*messages, {"role": "assistant", "content": text}]) for text in group.completions]

    def _asked(self, group: GroupToScore) -> str | Messages:
        if not self.prompt_column:
            return group.prompt
        row = group.extra_info if isinstance(group.extra_info, dict) else {}
        if self.prompt_column not in row:
            there = ", ".join(sorted(row)) or "none"
            raise Unusable(f"the row has no column {self.prompt_column!r}; its columns are {there}")
        try:
            question = _QUESTION.validate_python(row[self.prompt_column])
        except ValidationError:
            raise Unusable(
                f"column {self.prompt_column!r} holds neither a text nor messages with role and content"
            ) from None
        return question if isinstance(question, str) else [message.model_dump() for message in question]


def batches(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    batched: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        widest = lengths[batched[-1][0]] if batched else 0
        if batched and (len(batched[-1]) + 1) * widest <= max_tokens:
            batched[-1].append(place)
        else:
            batched.append([place])
    return batched


class Classifier:
    def __init__(self, folder: Path, options: ModelOptions) -> None:
        """Load a model. Raises ConfigError naming the problem."""
        try:
            check_folder(folder)
            check_tokenizer(folder / "tokenizer.json")
            config = read_json(folder / "tokenizer_config.json")
            self._special_tokens = special_tokens_of(config, folder)
            text = template_text(folder, config)
            self._template = None if text is None else ChatTemplate(text)
            # Without trust_remote_code=False, transformers asks on a terminal whether to run the folder's code.
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            model, report = AutoModelForSequenceClassification.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, use_safetensors=True, output_loading_info=True,
                dtype=getattr(torch, options.dtype),
            )  # fmt: skip
        except (UnsupportedModel, TemplateRefused) as err:
            raise ConfigError(f"{folder}: {err}") from None
        except (OSError, ValueError, KeyError) as err:
            raise ConfigError(f"{folder}: cannot be loaded as a sequence classifier: {err}") from None
        if missing := sorted(report["missing_keys"]):
            raise ConfigError(
                f"{folder}: the weights lack {', '.join(missing[:5])}; transformers would initialise them at random. "
                "Is this a language model without a classification head?"
            )
        self._model: Any = model.to(options.device).eval()
        self._device = options.device
        self._label = _checked_label(folder, int(model.config.num_labels), options.label)
        self._pad, self._pad_is_free = _padding(self._tokenizer)
        limit = min(int(getattr(model.config, "max_position_embeddings", None) or _MAX_CONTEXT), _MAX_CONTEXT)
        if options.max_length is not None and options.max_length > limit:
            raise ConfigError(f"--max-length {options.max_length} is beyond the model's own limit of {limit} tokens")
        self.max_length = options.max_length or limit
        self._batch_tokens = options.batch_tokens
        self.num_texts = self.num_tokens = 0

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def render(self, messages: Messages) -> str:
        """Return the text of a chat; raises Unusable if the template refuses it."""
        assert self._template is not None
        try:
            return self._template.render(
                messages, tools=None, documents=None, add_generation_prompt=False, **self._special_tokens
            )
        except TemplateRefused as err:
            raise Unusable(f"the model's chat template refuses the chat: {err}") from None

    def score(self, texts: Sequence[str], *, special_tokens: bool) -> list[Score]:
        """Return a score for every text, in order, with the part ``num_tokens``.

        ``special_tokens``: True if the tokenizer adds them (a chat template has added them already). A text
        longer than ``max_length`` is an error, because half an answer is another answer.
        """
        ids = self._tokenizer(list(texts), add_special_tokens=special_tokens)["input_ids"]
        lengths = [len(token_ids) for token_ids in ids]
        fits = [place for place, length in enumerate(lengths) if 0 < length <= self.max_length]
        self.num_texts += len(texts)
        self.num_tokens += sum(lengths)
        scored = [
            Score(error=f"the text has {length} tokens, expected 1 to {self.max_length} (--max-length)")
            for length in lengths
        ]
        for batch in batches([lengths[place] for place in fits], max_tokens=self._batch_tokens):
            places = [fits[number] for number in batch]
            values = self._forward([ids[place] for place in places])
            for place, value in zip(places, values, strict=True):
                scored[place] = _score(value, lengths[place])
        return scored

    def _forward(self, rows: Sequence[Sequence[int]]) -> list[float]:
        pad = self._pad if not self._pad_is_free else _unused(rows)
        longest = max(map(len, rows))
        input_ids = torch.full((len(rows), longest), pad, dtype=torch.long)  # [B, L]
        mask = torch.zeros((len(rows), longest), dtype=torch.long)  # [B, L], 1 for real tokens
        for number, row in enumerate(rows):
            input_ids[number, : len(row)] = torch.tensor(row, dtype=torch.long)
            mask[number, : len(row)] = 1
        self._model.config.pad_token_id = pad  # transformers uses it to find a row's last token
        with torch.inference_mode():
            out = self._model(input_ids=input_ids.to(self._device), attention_mask=mask.to(self._device))
        logits = out.logits.float()  # [B, labels]
        values = logits[:, 0] if self._label is None else logits.softmax(-1)[:, self._label]
        return values.tolist()


def fingerprint(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.is_file():
            about = file.stat()
            digest.update(f"{file.name}\n{about.st_size}\n".encode())
            digest.update(file.read_bytes() if file.suffix == ".json" else str(about.st_mtime_ns).encode())
    return digest.hexdigest()[:8]


def _checked_label(folder: Path, num_labels: int, label: int | None) -> int | None:
    if label is None:
        if num_labels != 1:
            raise ConfigError(f"{folder}: the model has {num_labels} labels; choose one with --label")
        return None
    if not 0 <= label < num_labels or num_labels == 1:
        raise ConfigError(f"--label {label}: the model has {num_labels} label{'s' if num_labels > 1 else ''}")
    return label


def _padding(tokenizer: Any) -> tuple[int, bool]:
    """Return the padding id, and whether each batch chooses it.

    Decoders find a text's last token as the last one that is not padding, so padding must not be a token that
    texts end with. If the tokenizer has no such token, each batch uses an id that does not occur in it.
    """
    pad = tokenizer.pad_token_id
    if pad is None or pad == tokenizer.eos_token_id:
        return 0, True
    return int(pad), False


def _unused(rows: Sequence[Sequence[int]]) -> int:
    used = {token for row in rows for token in row}
    return next(token for token in range(len(used) + 1) if token not in used)


class ModelReward(Hosted):
    """Served in large batches with low concurrency, because one model computes one batch at a time."""

    def __init__(self, folder: Path, options: ModelOptions) -> None:
        """Load the model; raises ConfigError."""
        model = self._model = Classifier(folder, options)
        form: Form = options.form if options.form != "auto" else "chat" if model.has_chat_template else "plain"
        if form == "chat" and not model.has_chat_template:
            raise ConfigError(f"{folder}: the tokenizer has no chat template; use --form plain")
        self._reading = Reading(form, model.render, options.prompt_column)
        self.title = f"{folder.name}: reward model in {options.dtype} on {options.device}"
        self.version = f"{fingerprint(folder)}-{form}-{options.dtype}"
        self.terms = {"timeout_s": options.timeout_s, "batch_size": 16, "concurrency": 2}

    @property
    def figures(self) -> Mapping[str, float]:
        return {"texts": self._model.num_texts, "tokens": self._model.num_tokens}

    async def score(self, groups: Sequence[GroupToScore]) -> list[list[Score]]:
        texts: list[str] = []
        by_group: list[list[Score] | range] = []
        for group in groups:
            try:
                more = self._reading.texts(group)
            except Unusable as err:
                by_group.append([Score(error=str(err))] * len(group.completions))
            else:
                by_group.append(range(len(texts), len(texts) + len(more)))
                texts += more
        scores = self._model.score(texts, special_tokens=self._reading.form == "plain") if texts else []
        return [[scores[place] for place in entry] if isinstance(entry, range) else entry for entry in by_group]


def _score(value: float, num_tokens: int) -> Score:
    if not math.isfinite(value):
        return Score(error=f"the model's output is {value}, expected a finite number; try --dtype float32")
    return Score(score=value, parts={"num_tokens": float(num_tokens)})
