"""What is read of each data file and what is not: format, columns by use, and what other settings would read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.trainer.data.messages import COLUMN, PYTHON_CHAT, chat_in_text, images_of, json_of, texts_of, unread_keys
from penstock.trainer.data.null_padding import RenamedRow
from penstock.trainer.data.read_rows import PromptRow, TurnRow, truth_column
from penstock.trainer.data.row_checks import as_setting, suggest
from penstock.trainer.data.row_files import Row
from penstock.trainer.row_format import RowFormat
from penstock.trainer.settings import DataSettings

_NO_VALUES = frozenset({"none", "nan", "null", "<na>", "n/a", "undefined"})
_BESIDE_PROMPTS = {  # columns of public data sets that a prompt may need, and what they can be read as
    "context": "", "passage": "", "choices": "", "options": "", "starter_code": "", "system_prompt": "system",
}  # fmt: skip
_REASONING = {"reasoning", "thinking", "cot", "reasoning_content", "reasoning_trace", "deepseek_thinking_trajectory"}
_RENDERED = re.compile(r"<\|(?:im_start|start_header_id|user|assistant|User)\|>|<start_of_turn>|\[INST\]|<｜User｜>")
_BEGUN = ("Assistant:", "ASSISTANT:", "### Response:")  # the end of a prompt that was rendered without control tokens
Use = Literal["prompt", "answer", "ground truth", "data source", "reward only", "unused"]
Purpose = Literal["grpo", "sft"]


def column_uses(row: Row, form: RowFormat, data: DataSettings, purpose: Purpose) -> dict[str, Use]:
    return {name: _use(name, row, form, data, purpose) for name in row}


def _use(name: str, row: Row, form: RowFormat, data: DataSettings, purpose: Purpose) -> Use:
    if name in (form.prompt, "system") or name in form.prompt_parts or (name == COLUMN and bool(images_of(row))):
        return "prompt"
    if name == "tools" and data.use_tools:
        return "prompt"
    if purpose == "sft":
        return "answer" if not form.is_whole_chat and name == form.answer_column(row) else "unused"
    if name in ("data_source", form.data_source):
        return "data source" if name == "data_source" or "data_source" not in row else "unused"
    if name == truth_column(row, form, data):
        return "ground truth"
    if name == "reward_model":
        return "unused"
    return "unused" if name in form.reads and name != "extra_info" else "reward only"


@dataclass(slots=True)
class FileNotes:
    path: Path
    purpose: Purpose
    num_rows: int = 0
    num_pairs: int = 0  # rows with two answers, which are no prompts
    formats: Counter[str] = field(default_factory=Counter)
    uses: dict[Use, Counter[str]] = field(default_factory=dict)
    answers_unused: int = 0  # rows of messages that end with an answer
    templated_texts: int = 0  # prompts that are texts, in the chat template
    plain_texts: int = 0
    chats_in_text: int = 0  # prompts whose text is the JSON of a chat
    message_keys: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)  # roles of messages that the template leaves out
    characters: set[str] = field(default_factory=set)  # of all prompts
    lost: Counter[str] = field(default_factory=Counter)  # characters without a token, by the prompts that have them
    changes: Counter[str] = field(default_factory=Counter)  # rows by what was changed when they were read
    python_chats: Counter[str] = field(default_factory=Counter)  # prompts and answers: a chat as Python prints it
    no_values: Counter[str] = field(
        default_factory=Counter
    )  # prompts, answers, truths: a word for nothing, such as nan
    listed_texts: int = 0  # prompts whose text is the JSON of a list of texts
    rendered: int = 0  # prompts with the marks of a chat template, in a message
    begun_twice: int = 0  # prompts with two BOS
    mapped: dict[str, str] = field(default_factory=dict)  # the file's name of a column, by the one it is read as
    map_key: str = "data.map"

    def add(self, row: Row, form: RowFormat, read: PromptRow | TurnRow, data: DataSettings, text: str | None) -> None:
        """Count a renamed row; ``text`` is its prompt as the model gets it, None: not known."""
        self.num_rows += 1
        self.formats[form.name] += 1
        self.mapped.update(data.map)
        self.map_key = data.map_key
        for name, use in column_uses(row, form, data, self.purpose).items():
            self.uses.setdefault(use, Counter())[name] += 1
        value: Any = row[form.prompt]
        if isinstance(value, str):
            self.plain_texts += read.is_plain
            self.templated_texts += not read.is_plain
            self.chats_in_text += chat_in_text(value) is not value
            listed = json_of(value)
            self.listed_texts += isinstance(listed, list) and all(isinstance(text, str) for text in listed)
        if not read.is_plain and not isinstance(read, TurnRow):
            last = "".join(texts_of(read.chat[-1]["content"])).rstrip()
            self.rendered += _RENDERED.search(last) is not None or last.endswith(_BEGUN)
        answer = None if form.is_whole_chat or self.purpose != "sft" else form.answer_column(row)
        for what, text_value in (("prompt", value), ("answer", row.get(answer or ""))):
            if isinstance(text_value, str):
                self.python_chats[what] += PYTHON_CHAT.match(text_value) is not None
                self.no_values[what] += text_value.strip().lower() in _NO_VALUES
        if isinstance(read, PromptRow):
            self.no_values["ground truth"] += (read.ground_truth or "").strip('"').lower() in _NO_VALUES
        self.changes.update(row.changes if isinstance(row, RenamedRow) else ())
        self.message_keys.update(unread_keys(value, obeys_marks=self.purpose == "sft"))
        self.answers_unused += isinstance(read, PromptRow) and read.unused_answer
        if text is not None and not read.is_plain:
            chat = read.chat if isinstance(read, PromptRow) else read.chat[:-1]
            said = [
                (m["role"], message_text.strip())
                for m in chat
                if m["role"] != "assistant"
                for message_text in texts_of(m["content"])
            ]
            self.left_out.update({role for role, message_text in said if message_text not in text})

    def add_text(self, text: str, tokenizer: ChatTokenizer) -> None:
        characters = set(text)
        if new := characters - self.characters:
            self.lost.update(dict.fromkeys(tokenizer.lost_characters(text) & new, 0))
            self.characters |= new
        self.lost.update(characters & self.lost.keys())

    def add_ids(self, ids: Sequence[int], tokenizer: ChatTokenizer) -> None:
        self.begun_twice += tokenizer.begins_twice(ids)

    def describe(self) -> list[str]:
        if not self.formats:
            return self.hints()
        forms = ", ".join(
            f"{name} ({count})" if len(self.formats) > 1 else name for name, count in self.formats.items()
        )
        return [f"format {forms}: {self.columns_text()}", *self.hints()]

    def columns(self, use: Use) -> list[str]:
        return sorted(self.uses.get(use, ()))

    def columns_text(self) -> str:
        words: dict[Use, str] = {"reward only": "for the reward only", "unused": "not used:"}
        used = {words.get(use, f"{use} from"): self.columns(use) for use in get_args(Use) if use in self.uses}
        return "; ".join(f"{word} {', '.join(map(self._named, columns))}" for word, columns in used.items())

    def _named(self, column: str) -> str:
        return f"{self.mapped[column]} ({self.map_key}.{column})" if column in self.mapped else column

    @property
    def suggested_map(self) -> dict[str, str]:
        if self.purpose != "grpo" or "ground truth" in self.uses:
            return {}
        return suggest(["prompt", *self.columns("reward only")])

    def hints(self) -> list[str]:
        return list(self._hints())

    def _hints(self) -> Iterator[str]:
        if self.num_pairs:
            yield f"{self.num_pairs} further rows are pairs of answers, trained on beside the groups (algorithm.dpo_coefficient)"
        if self.lost:
            shown = " ".join(character for character, _ in self.lost.most_common(12))
            yield (
                f"the model's tokenizer has no token for these characters, which vanish from prompts: {shown} (the first in "
                f"{max(self.lost.values())} rows)"
            )
        yield from self._answer_hints()
        yield from self._change_hints()
        if self.templated_texts:
            yield (
                f"{self.templated_texts} prompts are texts, each a user message in the chat template; "
                'data.text_prompts = "plain" uses them as they are'
            )
        if self.plain_texts:
            yield f'{self.plain_texts} prompts are texts, used as they are; data.text_prompts = "chat" makes them user messages'
        if self.chats_in_text:
            yield (
                f"{self.chats_in_text} prompts are the JSON text of a chat, used as a text; "
                f'{self.map_key}.messages = "prompt" reads the chat'
            )
        if "tools" in self.columns("reward only") + self.columns("unused"):
            yield "tools: not given to the chat template; data.use_tools = true gives them"
        for role, count in self.left_out.items():
            yield f"the model's chat template leaves out the {role} message of {count} rows, or changes its text"
        if self.message_keys:
            yield f"keys of messages that only the chat template may read: {', '.join(sorted(self.message_keys))}"

    def _change_hints(self) -> Iterator[str]:
        changes = dict(self.changes)
        if padded := changes.pop("padding", 0):
            yield (
                f"{padded} rows have tools or calls with keys that are null where the tool's schema does not require them, as tables fill "
                "objects up; these keys are left out"
            )
        if changes:
            yield f"left out, as the reward's input cannot hold it in some rows: {', '.join(sorted(changes))}"
        for column in sorted(_BESIDE_PROMPTS.keys() & {*self.columns("reward only"), *self.columns("unused")}):
            if self.templated_texts or self.plain_texts or column == "system_prompt":
                meaning = "input" if column == "context" and "alpaca" in self.formats else _BESIDE_PROMPTS[column]
                remedy = (
                    f'{self.map_key}.{meaning} = "{column}" gives it to the model'
                    if meaning
                    else "write it into the prompt if it is needed"
                )
                yield f"{column}: not part of the prompt; {remedy}"
        if self.listed_texts:
            yield f"{self.listed_texts} prompts are the JSON text of a list, used as a text; write one prompt in a row"
        yield from self.odd_texts()
        if self.begun_twice:
            yield (
                f"{self.begun_twice} prompts begin with the token that begins a text twice: they were rendered already; remove it from the "
                "texts"
            )

    def odd_texts(self) -> Iterator[str]:
        if self.rendered:
            yield (
                f"{self.rendered} prompts have the marks of a chat template in their text: they were rendered already; give the messages, or "
                'set data.text_prompts = "plain"'
            )
        for column in sorted(_REASONING & {*self.columns("unused")}) if self.purpose == "sft" else ():
            yield f"{column}: not part of the answers that SFT trains; write it into them, as <think>…</think>, if it is wanted"
        for what, count in self.python_chats.items():
            if count:
                yield f"{count} {what}s are a chat as Python prints it, used as a text; write the column as JSON"
        for what, count in self.no_values.items():
            if count:
                yield f"the {what} of {count} rows is a word for a missing value, such as None or nan, used as a text; remove these rows"

    def _answer_hints(self) -> Iterator[str]:
        if self.suggested_map and "answer" in self.suggested_map.values():
            yield self._truth_hint()
        elif self.answers_unused:
            yield (
                f"the last answer of {self.answers_unused} rows is not used: {self.purpose} writes its own; "
                "data.answer_is_ground_truth = true makes it the ground truth"
            )
        elif self.purpose == "grpo" and (lost := {"completion", "response", "output"} & set(self.columns("unused"))):
            yield f"{', '.join(sorted(lost))}: not used; data.answer_is_ground_truth = true makes it the ground truth"
        elif self.suggested_map:
            yield self._truth_hint()

    def _truth_hint(self) -> str:
        return (
            f"no column is read as the ground truth; if {', '.join(self.suggested_map.values())} holds it, set "
            f"{as_setting(self.suggested_map, self.map_key)}"
        )


def end_of_turn_note(tokenizer: ChatTokenizer) -> str:
    """Return what is wrong with a model whose template ends answers with no end token; empty if nothing is."""
    if not (behind := tokenizer.endless_turn()):
        return ""
    return (
        f"the chat template ends an answer with {behind!r}, in which none of the model's end tokens is: engines do not stop there; add its "
        "token to eos_token_id in generation_config.json"
    )
