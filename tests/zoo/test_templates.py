"""Tokenizers and chat templates in the forms of families: what a policy reads, what is trained of it, where it ends, and its calls."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from penstock.agents.proxy.answer_formats.answer_format import ANSWER_FORMATS
from penstock.agents.proxy.messages import Message, ToolCall
from penstock.agents.proxy.renderer import ChatRenderer, probe, shows_tools
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.trainer.data.turns import TurnSet
from penstock.trainer.settings import DataSettings
from tests.trainer.data.row_sets import write_rows
from tests.trainer.data.test_turn_masks import trained

with Path(__file__).with_name("templates.toml").open("rb") as _file:
    FORMS: dict[str, dict[str, Any]] = tomllib.load(_file)
each_form = pytest.mark.parametrize("name", FORMS)
CALLS = (ToolCall("call00001", "look", '{"word": "a \\"b\\" é\\n", "near": [1, {"x": null}]}'),)


def read(folder: Path, form: dict[str, Any]) -> ChatTokenizer:
    tokenizer = Tokenizer(
        models.BPE(vocab={c: n for n, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in form["tokens"]])
    tokenizer.save(str(folder / "tokenizer.json"))
    bos = next((text for text in form["tokens"] if text in form["system"].partition("Be")[0]), None)
    settings = {"eos_token": form["eos"], "bos_token": bos, "chat_template": form["template"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ends = [tokenizer.token_to_id(text) for text in form["ends"]]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return ChatTokenizer.read(folder)


@each_form
def test_a_policy_reads_its_prompt_and_learns_its_answers_to_their_end(name: str, tmp_path: Path) -> None:
    """A system message where the family puts it; of each answer its text and the token that ends a turn, which is an eos."""
    form = FORMS[name]
    tokenizer = read(tmp_path, form)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert tokenizer.render(chat, add_generation_prompt=True) == form["system"]
    chat += [
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "Thus"},
    ]
    path = write_rows(tmp_path, {"messages": chat})
    turns = TurnSet([path], data=DataSettings(), tokenizer=tokenizer, max_tokens=800, mask="turns")
    found = [text for stretches in trained(turns, tokenizer) for text in stretches]
    assert [text[-len(form["end"]) :] for text in found] == [form["end"]] * 2
    assert [text.removesuffix(form["end"])[-4:] for text in found] == ["Yes.", "Thus"]
    for number, turn in enumerate(turns[n] for n in range(2)):
        assert int(turn.token_ids[-1]) in tokenizer.eos_ids
        prompt = tokenizer.encode(tokenizer.render(chat[: 2 + 2 * number], add_generation_prompt=True))
        assert turn.token_ids[: len(prompt)].tolist() == prompt
        assert not turn.loss_mask[: len(prompt)].any()
        assert turn.loss_mask[len(prompt) :].all()


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form["calls"]])
def test_calls_that_a_template_writes_are_read_by_the_format_of_its_family(name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    renderer = ChatRenderer(read(tmp_path, form))
    assert shows_tools(renderer)
    user = Message("user", "Hello")
    prompt = renderer.text([user], ())
    answer = renderer.text([user, Message("assistant", "", "", CALLS)], (), generate=False).removeprefix(prompt)
    parsed = ANSWER_FORMATS.find(form["calls"]).value.parse(answer.removesuffix(form["end"]))
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == [
        (call.name, json.loads(call.arguments)) for call in CALLS
    ]
    assert parsed.content.strip() == ""


@each_form
def test_a_conversation_continues_behind_what_was_sampled(name: str, tmp_path: Path) -> None:
    """Wherever the template renders a longer conversation, which it may refuse, there is a bridge to it."""
    reports = [report for report in probe(ChatRenderer(read(tmp_path, FORMS[name]))) if report.renders]
    assert {"answer, then user", "reasoning and answer, then user"} <= {report.shape for report in reports}
    assert [report.shape for report in reports if not report.has_bridge] == []
