"""What SFT trains of a chat: each assistant turn by itself, or the parts that the chat template marks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.trainer.data.row_sets import write_rows

from penstock.deploy.quickstart_task import write_model
from penstock.protocol.chat_template import ChatTemplate
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.errors import TemplateRefused
from penstock.trainer.data.turns import TurnSet
from penstock.trainer.data_settings import TurnMasks
from penstock.trainer.errors import MalformedData
from penstock.trainer.settings import DataSettings

CHAT = [
    {"role": "user", "content": "sort 21"}, {"role": "assistant", "content": "12"},
    {"role": "user", "content": "sort 43"}, {"role": "assistant", "content": "34"},
    {"role": "user", "content": "bye"},
]  # fmt: skip
MARKED = (
    "{% if tools is not none %}tools{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{%- generation -%}{{ message['content'] }}<|im_end|>{%- endgeneration -%}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTokenizer]:
    folder = tmp_path_factory.mktemp("models")
    found = {}
    for name, text in (
        ("plain", None),
        ("marked", MARKED),
        ("endless", MARKED.replace("<|im_end|>{%- endg", "{%- endg")),
    ):
        write_model(folder / name, seed=0)
        if text is not None:
            (folder / name / "chat_template.jinja").write_text(text)
        found[name] = ChatTokenizer.read(folder / name)
    return found


def read(folder: Path, tokenizer: ChatTokenizer, mask: TurnMasks, rows: Any = None) -> TurnSet:
    path = write_rows(folder, *(rows or [{"messages": CHAT}]))
    return TurnSet([path], data=DataSettings(), tokenizer=tokenizer, max_tokens=200, mask=mask)


def trained(turns: TurnSet, tokenizer: ChatTokenizer) -> list[list[str]]:
    """Return the trained texts of each example, one for each stretch without a gap."""
    found = []
    for number in range(len(turns)):
        turn, stretches = turns[number], []
        for at, is_trained in enumerate(turn.loss_mask.tolist()):
            if is_trained and not turn.loss_mask[at - 1]:
                stretches.append([])
            if is_trained:
                stretches[-1].append(int(turn.token_ids[at]))
        found.append(tokenizer.decode_many(stretches, skip_special_tokens=False))
    return found


def test_markers_make_a_chat_one_example(models: dict[str, ChatTokenizer], tmp_path: Path) -> None:
    """Every marked turn is trained with its end token, in the chat as the template renders it, up to the last of them."""
    tokenizer = models["marked"]
    for mask in ("auto", "markers"):
        turns = read(tmp_path, tokenizer, mask)
        assert trained(turns, tokenizer) == [["12<|im_end|>", "34<|im_end|>"]]
        whole = tokenizer.encode(tokenizer.render(CHAT, add_generation_prompt=False))
        assert turns[0].token_ids.tolist() == whole[: len(turns[0].token_ids)]
        assert turns.num_endless == 0


def test_turns_make_each_answer_an_example(models: dict[str, ChatTokenizer], tmp_path: Path) -> None:
    for name, mask in (("plain", "auto"), ("marked", "turns")):
        turns = read(tmp_path, models[name], mask)  # pyright: ignore[reportArgumentType]
        assert trained(turns, models[name]) == [["12<|im_end|>"], ["34<|im_end|>"]]
    with pytest.raises(MalformedData, match=r"marks no answers with \{% generation %\}.*sft.mask = \"turns\""):
        read(tmp_path, models["plain"], "markers")


def test_markers_without_an_end_token_are_counted(models: dict[str, ChatTokenizer], tmp_path: Path) -> None:
    """A model that is trained so does not learn to end its answer, which the log says; the markers are followed."""
    turns = read(tmp_path, models["endless"], "auto")
    assert trained(turns, models["endless"]) == [["12", "34"]]
    assert turns.num_endless == 1


def test_a_template_that_changes_marked_text_is_refused() -> None:
    assert ChatTemplate("a{% generation %}b{% endgeneration %}c").render_marked([]) == [
        ("a", False),
        ("b", True),
        ("c", False),
    ]
    changed = "{% set text %}{% generation %} b {% endgeneration %}{% endset %}{{ text | trim }}"
    with pytest.raises(TemplateRefused, match="changes the text inside its generation blocks"):
        ChatTemplate(changed).render_marked([])
    assert not ChatTemplate("{{ '{%' }} generation %}").marks_answers
    assert ChatTemplate("{%- generation -%}x{%- endgeneration %}").render([]) == "x"
