"""Rows as other projects write them: what is trained is the text that was meant, and what is not is counted."""

from __future__ import annotations

import json
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.trainer.data.row_sets import ANSWER, USER, pair_set, prompt_set, trained_texts, turn_set, write_rows
from tests.trainer.data.test_chat_template import write_folder

from penstock.deploy.data_check.commands import main
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.trainer.errors import MalformedData

_TURNS = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}CALLS<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_EACH = "{% for c in m.tool_calls or [] %}{% set f = c.function or c %}CALL{% endfor %}"
_OBJECT = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'


def _template(call: str) -> str:
    return _TURNS.replace("CALLS", _EACH.replace("CALL", call))


TEMPLATES = {  # each writes a call in the way of the family it is named after
    "qwen2.5": _template("<tool_call>\n" + _OBJECT + "\n</tool_call>"),
    "llama3": _template(_OBJECT.replace("arguments", "parameters", 1)),
    "mistral": _template('[TOOL_CALLS][{{ {"name": f.name, "arguments": f.arguments} | tojson }}]'),
    "qwen3": _template(
        "<tool_call>{% if f.arguments is string %}{{ f.arguments }}{% else %}{{ f.arguments | tojson }}{% endif %}"
    ),
    "deepseek": _template("{{ f.name + '\n' + f.arguments }}"),
    "printing": _template("{{ f.name }}({{ f.arguments }})"),
    "glm": _template("{{ f.name }}{% for k, v in f.arguments.items() %}<k>{{ k }}</k><v>{{ v }}</v>{% endfor %}"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTokenizer]:
    base = tmp_path_factory.mktemp("models")
    return {name: ChatTokenizer.read(write_folder(base / name, text)) for name, text in TEMPLATES.items()}


def tool(name: str, *required: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}


def call(name: str, arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}], **more}


TEXT = {"type": "string"}
WEATHER, STOCK = tool("weather", "city", city=TEXT, unit=TEXT), tool("stock", "ticker", ticker=TEXT, day=TEXT)


CALLS = [("weather", {"city": "Bern"}), ("stock", {"ticker": "N"})]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("arguments", [{"city": "Bern"}, '{"city": "Bern"}'], ids=["object", "text"])
def test_arguments_are_written_once_by_every_template(models: Any, tmp_path: Path, name: str, arguments: Any) -> None:
    """An object and its JSON text give the same trained text, which quotes nothing twice and is no Python."""
    answers = trained_texts(
        turn_set(write_rows(tmp_path, {"messages": [USER, call("weather", arguments)]}), models[name]), models[name]
    )
    [expected] = trained_texts(
        turn_set(write_rows(tmp_path, {"messages": [USER, call("weather", {"city": "Bern"})]}), models[name]),
        models[name],
    )
    assert answers == [expected]
    assert "\\" not in expected
    assert "'" not in expected
    assert ('{"city": "Bern"}' if name != "glm" else "<k>city</k><v>Bern</v>") in expected


def test_padding_of_tables_is_left_out_everywhere(models: Any, tmp_path: Path) -> None:
    """Schemas and calls of SFT, preferences and prompts have no keys of other rows; the note counts the rows."""
    model = models["qwen2.5"]
    chats = [[USER, call("weather", {"city": "Bern"})], [USER, call("stock", {"ticker": "N", "deep": {"a": 1}})]]
    chats.append([USER, call("stock", {"ticker": "N", "deep": {"b": 2}})])
    path = write_rows(tmp_path, *({"messages": c, "tools": [WEATHER, STOCK]} for c in chats), kind="parquet")
    turns = turn_set(path, model, use_tools=True)
    assert '"arguments": {"city": "Bern"}}' in trained_texts(turns, model)[0]
    assert '"arguments": {"ticker": "N", "deep": {"b": 2}}}' in trained_texts(turns, model)[2]
    assert "null" not in model.decode(turns[0].token_ids.tolist())
    assert any("3 rows have tools or calls with keys that are null" in hint for hint in turns.notes[0].hints())
    prompts = [{"messages": [*c, {"role": "tool", "content": "r"}], "tools": [WEATHER, STOCK]} for c in chats]
    loaded = prompt_set(write_rows(tmp_path, *prompts, kind="parquet"), model, use_tools=True)
    assert all("null" not in loaded[n].text for n in range(3))
    pairs = [{"prompt": [USER], "chosen": [c[1]], "rejected": [ANSWER], "tools": [WEATHER, STOCK]} for c in chats]
    both = pair_set(write_rows(tmp_path, *pairs, kind="parquet"), model, use_tools=True)
    assert all("null" not in model.decode([*both[n].prompt, *both[n].chosen]) for n in range(3))


@pytest.mark.parametrize(
    ("kind", "schema", "arguments", "kept"),
    [
        ("parquet", tool("f", "a", "b", a=TEXT, b=TEXT), {"a": "x", "b": None}, True),
        ("parquet", tool("f", "a", a=TEXT, b=TEXT), {"a": "x", "b": None}, False),
        ("parquet", None, {"a": "x", "b": None}, False),
        ("jsonl", None, {"a": "x", "b": None}, True),
        ("jsonl", tool("f", "a", a=TEXT), {"a": "x", "b": None}, False),
        ("jsonl", tool("f", "a", a=TEXT, b=TEXT), {"a": "x", "b": None}, False),
        ("jsonl", tool("f", "a", a=TEXT, b={"type": ["string", "null"]}), {"a": "x", "b": None}, True),
        ("jsonl", tool("f", a=TEXT, b={"anyOf": [TEXT, {"type": "null"}]}), {"a": "x", "b": None}, True),
        ("jsonl", tool("f", a=TEXT, b={"enum": ["x", None]}), {"a": "x", "b": None}, True),
        ("jsonl", tool("f", a=TEXT, b={"type": "string", "nullable": True}), {"a": "x", "b": None}, True),
        ("jsonl", tool("f", a=TEXT), '{"a": "x", "b": null}', False),
        ("jsonl", tool("f", c={"type": "object", "properties": {"a": TEXT}}), {"c": {"a": "x", "b": None}}, False),
        ("jsonl", tool("f", c={"type": "array", "items": {"type": "object", "properties": {"a": TEXT}}}),
         {"c": [{"a": "x", "b": None}]}, False),
    ],
)  # fmt: skip
def test_a_null_that_was_meant_is_kept(models: Any, tmp_path: Path, kind: str, schema: Any, arguments: Any, kept: bool):
    row = {"messages": [USER, call("f", arguments)], **({"tools": [schema]} if schema else {})}
    [text] = trained_texts(turn_set(write_rows(tmp_path, row, kind=kind), models["qwen2.5"]), models["qwen2.5"])
    assert ('"b": null' in text) is kept
    assert '"a": "x"' in text


def _padded(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "arguments": {**arguments, "no": None}}


def _function(name: str, arguments: Any) -> dict[str, Any]:
    return {**ANSWER, "content": "", "function_call": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("parquet", [{"messages": [USER, _function(*c)]} for c in CALLS]),
        ("parquet", [{"messages": [USER, _function(*c), {"role": "function", "content": "r"}, ANSWER]} for c in CALLS]),
        ("parquet", [{"query": "q", "tools": "[]", "answers": [{"name": n, "arguments": a}]} for n, a in CALLS]),
        ("jsonl", [{"query": "q", "tools": [WEATHER], "answers": json.dumps([_padded(n, a)])}
                   for n, a in CALLS[:1]]),
        ("jsonl", [{"messages": [USER, {**ANSWER, "tool_calls": json.dumps([{"function": _padded(n, a)}])}],
                    "tools": json.dumps([WEATHER])} for n, a in CALLS[:1]]),
        ("jsonl", [{"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": json.dumps(
            {"name": n, "arguments": {**a, "no": None}})}], "tools": json.dumps([WEATHER])} for n, a in CALLS[:1]]),
    ],
)  # fmt: skip
def test_padding_is_left_out_of_every_form_of_call(models: Any, tmp_path: Path, kind: str, rows: Any) -> None:
    model = models["qwen2.5"]
    turns = turn_set(write_rows(tmp_path, *rows, kind=kind), model)
    texts = [model.decode(turns[n].token_ids.tolist()) for n in range(len(turns))]
    assert all('"arguments": {"city": "Bern"}}' in t or '"arguments": {"ticker": "N"}}' in t for t in texts)
    assert any(f"{len(rows)} rows have tools or calls with keys that are null" in h for h in turns.notes[0].hints())


@pytest.mark.parametrize("make", [call, _function])
def test_padding_is_left_out_of_answers_that_are_one_message(models: Any, tmp_path: Path, make: Any) -> None:
    better, worse = (make(*c) for c in CALLS)
    rows = [{"conversations": [{"from": "human", "value": "q"}], "chosen": better, "rejected": worse}] * 2
    rows[1] = {**rows[1], "chosen": worse, "rejected": better}
    pairs = pair_set(write_rows(tmp_path, *rows, kind="parquet"), models["qwen2.5"])
    assert all("null" not in models["qwen2.5"].decode([*pairs[n].chosen, *pairs[n].rejected]) for n in range(2))


def _call_text(text: str) -> dict[str, str]:
    return {"from": "function_call", "value": text}


_CALL = '{"name": "weather", "arguments": {"city": "Bern"}}'
_TOOLS_TEXT = json.dumps([WEATHER])
_FROM = [{"from": "human", "value": "q"}, _call_text(_CALL)]


@pytest.mark.parametrize("role", ["function_response", "function-response", "tool_result", "ipython"])
def test_roles_of_tool_results_are_read(models: Any, tmp_path: Path, role: str):
    """Glaive's, and those of Llama's template."""
    model = models["qwen2.5"]
    rows = [*_FROM, {"from": role, "value": "cold"}, {"from": "gpt", "value": "It is cold."}]
    turns = turn_set(write_rows(tmp_path, {"conversations": rows}), model)
    called = f"<tool_call>\n{_CALL}\n</tool_call><|im_end|>"
    assert trained_texts(turns, model) == [called, "It is cold.<|im_end|>"]


_SCHEMA_TEXT = json.dumps(WEATHER["function"]["parameters"])


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("tools", "shown"),
    [
        (_TOOLS_TEXT, True),
        ([_TOOLS_TEXT[1:-1]], True),
        ([WEATHER], True),
        ([WEATHER["function"]], True),
        ([{**WEATHER["function"], "parameters": _SCHEMA_TEXT}], True),
        ("[]", False),
        ("null", False),
        ("", False),
    ],
)
def test_tools_are_read_alike_everywhere(models: Any, tmp_path: Path, kind: str, tools: Any, shown: bool) -> None:
    """Objects and JSON texts, whole or in part, are the same to SFT, preferences and prompts."""
    model, use = models["qwen2.5"], {"use_tools": True}
    turn = turn_set(write_rows(tmp_path, {"messages": [USER, ANSWER], "tools": tools}, kind=kind), model, **use)[0]
    pair = pair_set(
        write_rows(tmp_path, {"prompt": [USER], "chosen": "a", "rejected": "b", "tools": tools}, kind=kind),
        model,
        **use,
    )[0]
    text = prompt_set(write_rows(tmp_path, {"prompt": [USER], "tools": tools}, kind=kind), model, **use)[0].text
    assert text == model.decode(pair.prompt.tolist()) == model.decode(turn.token_ids[~turn.loss_mask].tolist())
    assert ('"weather"' in text) is shown
    if kind == "jsonl" and shown:
        assert f"<tools>{json.dumps(WEATHER)}</tools>" in text


def test_calls_in_messages_of_their_own_are_one_answer(models: Any, tmp_path: Path) -> None:
    """With each other, and with the empty answer before them."""
    calls = [{**ANSWER, "content": ""}, *[{"role": "tool_call", "content": _CALL}] * 2]
    turns = turn_set(write_rows(tmp_path, {"messages": [USER, *calls]}), models["qwen2.5"])
    assert [text.count("<tool_call>") for text in trained_texts(turns, models["qwen2.5"])] == [2]


@pytest.mark.parametrize("tags", [True, False])
def test_a_tool_result_is_tagged_once(tmp_path: Path, tags: bool) -> None:
    """Rows of Hermes have the tags in the text; they stay where the template writes none."""
    tagged = "<tool_response>\n{{ m.content }}\n</tool_response>"
    wrapped = "{% if m.role == 'tool' %}" + tagged + "{% else %}{{ m.content }}{% endif %}"
    template = TEMPLATES["qwen2.5"].replace("{{ m.content }}", wrapped) if tags else TEMPLATES["qwen2.5"]
    model = ChatTokenizer.read(write_folder(tmp_path / "m", template))
    result = {"from": "tool", "value": "<tool_response>\n{}\n</tool_response>"}
    turns = turn_set(write_rows(tmp_path, {"conversations": [*_FROM, result, {"from": "gpt", "value": "a"}]}), model)
    assert model.decode(turns[1].token_ids.tolist()).count("<tool_response>\n{}\n</tool_response>") == 1
    assert "<tool_response>\n<tool_response>" not in model.decode(turns[1].token_ids.tolist())


def test_calls_that_the_template_reads_otherwise_are_explained(tmp_path: Path) -> None:
    strict = (
        TEMPLATES["qwen2.5"].replace("c.function or c", "c.function").replace("{{ f.name }}", "{{ c.function.name }}")
    )
    model = ChatTokenizer.read(write_folder(tmp_path / "m", strict))
    row = {"messages": [USER, {**ANSWER, "tool_calls": [{"name": "f", "arguments": {}}]}]}
    with pytest.raises(MalformedData, match=r'\'function\'; write each of tool_calls as {"type": "function"'):
        turn_set(write_rows(tmp_path, row), model)


_SPELT = '{"text": "a \\u003c|im_end|\\u003e b"}'  # a control token, once the text is read as JSON
_MARKED = [{**ANSWER, "content": "bad"}, USER, ANSWER]


@pytest.mark.parametrize(
    ("mark", "answers"),
    [
        ({key: value}, ["a<|im_end|>"])
        for key in (
            "weight", "loss", "train", "train_on_turn", "trainable", "loss_scale", "label", "loss_mask", "step_loss_mask",
            "loss_weight", "is_trained",
        )
        for value in (0, False, 0.0, "false")
    ]
    + [({key: True}, ["a<|im_end|>"]) for key in ("mask", "masked", "is_masked")]
    + [({"weight": 1}, ["bad<|im_end|>", "a<|im_end|>"]), ({"masked": False}, ["bad<|im_end|>", "a<|im_end|>"])],
)  # fmt: skip
def test_marks_of_answers_are_obeyed(models: Any, tmp_path: Path, mark: dict[str, Any], answers: list[str]) -> None:
    path = write_rows(tmp_path, {"messages": [USER, {**_MARKED[0], **mark}, *_MARKED[1:]]})
    turns = turn_set(path, models["qwen2.5"])
    assert trained_texts(turns, models["qwen2.5"]) == answers
    assert turns.dropped["marked as not trained"] == 2 - len(answers)
    [mark_name] = mark
    assert not any(mark_name in hint for hint in turns.notes[0].hints())


def test_a_marked_block_that_is_not_to_be_trained_is_not(models: Any, tmp_path: Path) -> None:
    said = "{{ m.content }}<|im_end|>"
    marked = "{% generation %}" + said + "{% endgeneration %}"
    marks = "{% if m.role == 'assistant' %}" + marked + "{% else %}" + said + "{% endif %}"
    template = TEMPLATES["qwen2.5"].replace("{{ m.content }}", marks, 1)
    tokenizer = ChatTokenizer.read(write_folder(tmp_path / "m", template))
    path = write_rows(tmp_path, {"messages": [USER, {**_MARKED[0], "weight": 0}, *_MARKED[1:]]})
    assert trained_texts(turn_set(path, tokenizer), tokenizer) == ["a<|im_end|>"]


@pytest.mark.parametrize(
    ("row", "reply"),
    [
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, r"column messages\[1\].weight: expected true, false, 1 or 0"),
        ({"messages": [USER, {**ANSWER, "train_detail": [{"begin": 0}]}]}, r"column messages\[1\].train_detail"),
        *[
            ({"messages": [USER, {**ANSWER, name: value}]}, rf"column messages\[1\].{name}: expected a mark such as loss")
            for name, value in {
                "no_loss": True, "compute_loss": False, "skip": True, "ignore": 1, "learn": 0, "do_train": "false"
            }.items()
        ],
        ({"messages": [USER, ANSWER], "label": False},
         r'column label: .* dpo.loss = "kto" .* data.ignore = \["label"\]'),
        ({"messages": [USER, ANSWER], "kto_tag": True}, r"column kto_tag: tells good completions from bad ones"),
        ({"prompt": "q", "completion": "a", "label": "False"}, r"column label: tells good"),
        *[({"prompt": "q", "completion": "a", "label": one}, "label: tells good") for one in (0, 1, 0.0, "0", "1.0")],
        *[({**row, "label": label}, r"column label: tells good") for label in (0, False, "0") for row in (
            {"instruction": "q", "output": "a"}, {"input": "q", "output": "a"}, {"question": "q", "answer": "a"},
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]})],
        ({"messages": [USER, ANSWER], "kto_tag": 0}, r"column kto_tag: tells good"),
        *[({"prompt": "q", "completion": "a", "label": one}, "label: tells good") for one in (-1, -1.0, "-1")],
        ({"messages": [USER, ANSWER], "label_smoothing": 0.1}, "column label_smoothing: .* set dpo.label_smoothing for all"),
        ({"messages": [USER, ANSWER], "loss_scale": 0.5}, "column loss_scale: .* round it"),
        *[({"messages": [USER, ANSWER], name: {"path": "a.png"}}, f"column {name}: what is read is text alone")
          for name in ("image_1", "image_12", "videos_2")],
        ({"prompt": "q", "response": [{**USER, "content": "p"}, ANSWER]},
         r"column response: expected an answer, or the whole chat"),
        ({"prompt": "q", "response": [{**USER, "content": "q "}, ANSWER]}, r"column response: .* make them equal"),
        ({"messages": [USER, {**ANSWER, "content": "a <|im_end|> b"}]},
         r"column messages: message 1 \(assistant\) has the text '<\|im_end\|>'.* data.control_tokens"),
        ({"messages": [USER, call("f", _SPELT)]}, r"message 1 \(assistant\) has the text '<\|im_end\|>'"),
        ({"messages": [USER, call("f", {"<|im_end|>": {"x": 1}})]}, r"message 1 \(assistant\) has the text"),
        ({"messages": [USER, call("f", {"x": [{"a <|im_start|>": 1}]})]}, r"message 1 \(assistant\) has the text"),
        ({"messages": [USER, {**ANSWER, "function_call": {"name": "f", "arguments": _SPELT}}]}, r"has the text"),
        ({"conversations": [_FROM[0], _call_text(json.dumps({"name": "f", "arguments": _SPELT}))]},
         r"column conversations: message 1 \(assistant\) has the text"),
        ({"messages": [USER, ANSWER], "tools": [tool("f", "<|im_end|>")]},
         r"column tools: a tool has the text '<\|im_end\|>'"),
        ({"messages": [USER, ANSWER], "tools": json.dumps([tool("f", **{"<|im_end|>": TEXT})])},
         "column tools: a tool has"),
        ({"messages": [{**USER, "content": "\U00100001"}, ANSWER]}, r"has the character U\+100001"),
        ({"messages": [USER, {"role": "function_call", "content": "no call"}]},
         r"messages\[1\].content: expected a call"),
        ({"messages": [USER, call("f", "{broken")]}, r"tool_calls\[0\].function.arguments: expected an object"),
        *[({"messages": [USER, call("f", text)]},
          r"tool_calls\[0\].function.arguments: expected an object, .* without NaN")
          for text in ('{"x": NaN}', '{"x": [1e999]}', '{"x": 1, "x": null}', {"x": float("nan")})],
        ({"conversations": [_FROM[0], _call_text('{"name": "f", "arguments": {"x": 1, "x": 2}}')]},
         r"conversations\[1\].value: expected a call"),
        ({"messages": [USER, {**ANSWER, "loss": True}, {"role": "function_call", "content": _CALL, "loss": False}]},
         r"column messages\[2\]: expected the mark of the message before it"),
        ({"system": "SYSTEM: s", "chat": "USER: q\n\n\nASSISTANT: <functioncall> {name: f} <|endoftext|>"},
         "after <functioncall>"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(models: Any, tmp_path: Path, row: dict[str, Any], reply: str) -> None:
    with pytest.raises(MalformedData, match=f"rows.jsonl:1: .*{reply}"):
        turn_set(write_rows(tmp_path, row), models["qwen2.5"], use_tools=True)


def test_control_tokens_are_escaped_or_kept_by_a_setting(models: Any, tmp_path: Path) -> None:
    """Escaped, the text is read as written, and ends at the token that the template writes; kept, it ends early."""
    model = models["qwen2.5"]
    texts = "say <|im_end|> now <|im_end|><|im_start|>system"
    path = write_rows(tmp_path, {"messages": [{**USER, "content": texts}, {**ANSWER, "content": texts}]})
    escaped = turn_set(path, model, control_tokens="escape")
    assert trained_texts(escaped, model) == [f"{texts}<|im_end|>"]
    assert escaped[0].token_ids.tolist().count(2) == 2  # those of the template alone
    assert trained_texts(turn_set(path, model, control_tokens="keep"), model) == ["say <|im_end|>"]
    prompt = prompt_set(write_rows(tmp_path, {"prompt": texts}), model, control_tokens="escape")[0]
    assert prompt.token_ids.count(2) == 1
    assert model.decode(prompt.token_ids) == prompt.text
    both = pair_set(
        write_rows(tmp_path, {"prompt": "q", "chosen": texts, "rejected": "b"}), model, control_tokens="escape"
    )
    assert model.decode(both[0].chosen.tolist()) == f"{texts}<|im_end|>"
    for arguments in (_SPELT, {"text": "a <|im_end|> b", "<|im_end|>": {}}):
        row = {"messages": [USER, call("f", arguments)], "tools": [tool("f", "<|im_end|>")]}
        turn = turn_set(write_rows(tmp_path, row), model, control_tokens="escape", use_tools=True)[0]
        assert turn.token_ids.tolist().count(2) == 2
        assert model.decode(turn.token_ids[turn.loss_mask].tolist()).endswith("}\n</tool_call><|im_end|>")
        assert "<|im_end|> b" in model.decode(turn.token_ids.tolist())


def test_a_token_that_the_template_writes_is_one_of_control(models: Any, tmp_path: Path) -> None:
    """Some tokenizers mark neither the tokens of turns nor the end token as special; other ones stay ordinary."""
    folder = write_folder(tmp_path / "m", TEMPLATES["qwen2.5"])
    described = json.loads((folder / "tokenizer.json").read_text())
    described["added_tokens"] = [{**token, "special": False} for token in described["added_tokens"]]
    described["added_tokens"] += [
        {**described["added_tokens"][0], "id": 900 + n, "content": text} for n, text in enumerate(("assistant", "<b>"))
    ]
    (folder / "tokenizer.json").write_text(json.dumps(described))
    model = ChatTokenizer.read(folder)
    for text in ("<|im_end|>", "<|im_start|>", "<|endoftext|>"):
        with pytest.raises(MalformedData, match="which is a control token of the model"):
            turn_set(write_rows(tmp_path, {"messages": [USER, {**ANSWER, "content": f"a {text} b"}]}), model)
    row = {"messages": [USER, {**ANSWER, "content": "assistant <b>"}]}
    assert trained_texts(turn_set(write_rows(tmp_path, row), model), model) == ["assistant <b><|im_end|>"]


@pytest.mark.parametrize(
    "row", [{"prompt": "q", "answer": "a", "label": "math"}, {"input": "q", "output": "a", "label": "72"}]
)
def test_a_label_that_is_a_class_or_a_truth_is_no_judgement(models: Any, tmp_path: Path, row: Any) -> None:
    model = models["qwen2.5"]
    assert trained_texts(turn_set(write_rows(tmp_path, row), model), model) == ["a<|im_end|>"]
    for label in (1, "0"):  # a reward's, where the model writes the answers itself
        assert len(prompt_set(write_rows(tmp_path, {**row, "label": label}), model)) == 1


@pytest.mark.parametrize(
    ("row", "data"),
    [
        ({"prompt": "q", "chosen": [USER, ANSWER], "rejected": [USER, ANSWER]},
         {"map": {"response": "chosen"}, "ignore": ["rejected"]}),
        ({"prompt": [USER], "completion": [USER, ANSWER]}, {}),
        ({"prompt": "q", "response": [USER, ANSWER]}, {}),
        ({"prompt": [USER], "completion": [ANSWER]}, {}),
    ],
)  # fmt: skip
def test_a_prompt_that_its_answer_repeats_is_read_once(models: Any, tmp_path: Path, row: Any, data: Any) -> None:
    model = models["qwen2.5"]
    turn = turn_set(write_rows(tmp_path, row), model, **data)[0]
    assert model.decode(turn.token_ids.tolist()) == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [USER, ANSWER], "weight": 0}, "marked as not trained"),
        ({"messages": [USER, ANSWER], "loss_weight": 0.0}, "marked as not trained"),
        ({"prompt": "q", "completion": "a", "train": "false"}, "marked as not trained"),
        ({"messages": [USER, ANSWER], "loss": False}, "marked as not trained"),
        ({"messages": [USER, ANSWER], "masked": True}, "marked as not trained"),
        *[({"prompt": "q", "completion": "a", name: value}, "marked as wrong")
          for name in ("correct", "is_correct", "is_good", "passed", "resolved", "success")
          for value in (False, 0, 0.0, "False", "0")],
        ({"messages": [ANSWER]}, "answer without a prompt"),
        ({"conversations": [{"from": "gpt", "value": "a"}]}, "answer without a prompt"),
        ({"messages": [USER, {**ANSWER, "content": " "}]}, "empty answer"),
        ({"messages": [{**USER, "content": "\n"}, ANSWER]}, "blank prompt"),
    ],
)  # fmt: skip
def test_what_is_left_out_has_a_reason(
    models: Any, tmp_path: Path, row: dict[str, Any], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_rows(tmp_path, {"messages": [USER, ANSWER]}, row)
    turns = turn_set(path, models["qwen2.5"])
    assert (len(turns), dict(turns.dropped)) == (1, {reason: 1})
    main(["data-check", "--no-tests", str(path)])
    assert f"1 {reason}" in capsys.readouterr().out
    with pytest.raises(MalformedData, match=f"no row is left: 1 (of them: |answers are ){reason}"):
        turn_set(write_rows(tmp_path, row), models["qwen2.5"])


def test_a_labelled_chat_is_read_for_kto(models: Any, tmp_path: Path) -> None:
    rows = [{"messages": [USER, ANSWER], "label": False}, {"conversations": _FROM, "kto_tag": "true"}]
    rows += [{"input": "q", "output": "a", "label": label} for label in ("0", 1.0, False)]
    rows += [{"question": "q", "answer": "a", "label": 0}, {"prompt": "q", "completion": "a", "label": "1"}]
    rows += [{"prompt": "q", "completion": "a", "label": -1}]
    pairs = pair_set(write_rows(tmp_path, *rows), models["qwen2.5"])
    good = [bool(len(pairs[n].chosen)) for n in range(len(pairs))]
    assert good == [False, True, False, True, False, False, True, False]
    assert [bool(len(pairs[n].rejected)) for n in range(len(pairs))] == [not is_good for is_good in good]


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        ([USER, {**ANSWER, "weight": 0}], "marked as not trained"),
        ([USER, {**ANSWER, "content": ""}], "empty answer"),
        ([{**USER, "content": " "}, ANSWER], "blank prompt"),
    ],
)
def test_a_label_is_of_the_last_answer_alone(models: Any, tmp_path: Path, last: Any, reason: str) -> None:
    rows = [
        {"messages": [USER, ANSWER, *last], "label": False},
        {"messages": [USER, ANSWER, *_MARKED[1:]], "label": True},
    ]
    pairs = pair_set(write_rows(tmp_path, *rows, {**rows[1], "weight": 0}), models["qwen2.5"])
    assert len(pairs) == 1
    assert pairs.dropped == Counter({reason: 1}) + Counter({"marked as not trained": 1})


_UNUSED: dict[str, Any] = {
    "nan": pa.array([float("nan")]),
    "infinite": pa.array([float("inf")]),
    "bytes": pa.array([b"\xff\x00"]),
    "timedelta": pa.array([timedelta(days=1)]),
    "nanoseconds": pa.array([1], pa.timestamp("ns")),
    "map": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
    "nested": pa.array([{"a": [{"b": float("nan"), "c": b"x"}]}]),
}


@pytest.mark.parametrize("kind", _UNUSED)
def test_a_column_without_a_meaning_never_refuses_a_row(models: Any, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["q"], "level": [3], "odd": _UNUSED[kind]}), path)
    loaded = prompt_set(path, models["qwen2.5"])
    assert json.loads(loaded[0].reward.extra_info)["level"] == 3
    if kind in ("bytes", "nanoseconds", "nested"):
        assert any(
            "left out, as the reward's input cannot hold it in some rows: odd" in h for h in loaded.notes[0].hints()
        )


def test_values_of_tables_and_nan_of_json_reach_the_reward(models: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["q"], "extra_info": _UNUSED["map"]}), path)
    assert json.loads(prompt_set(path, models["qwen2.5"])[0].reward.extra_info) == {"k": 1}
    (tmp_path / "rows.jsonl").write_text('{"prompt": "q", "score": NaN, "x": {"y": Infinity}, "odd": "\\ud800"}\n')
    assert json.loads(prompt_set(tmp_path / "rows.jsonl", models["qwen2.5"])[0].reward.extra_info) == {
        "score": None,
        "x": {"y": None},
    }
    (tmp_path / "rows.jsonl").write_text('{"prompt": "q", "extra_info": {"a": {"b": NaN}}}\n')
    with pytest.raises(MalformedData, match=r":1: column extra_info.a.b: .* got nan .* data.ignore"):
        prompt_set(tmp_path / "rows.jsonl", models["qwen2.5"])


@pytest.mark.parametrize(
    ("content", "note"),
    [
        ('prompt\n"[{\'role\': \'user\', \'content\': \'q\'}]"\n', "1 prompts are a chat as Python prints it"),
        ('prompt,response\nq,"[{\'role\': \'assistant\', \'content\': \'a\'}]"\n',
         "1 answers are a chat as Python prints it"),
        ("prompt,response\nq,nan\n", "the answer of 1 rows is a word for a missing value"),
        ("prompt,ground_truth\nNone,1\nq,nan\n", "the prompt of 1 rows is a word for a missing value"),
        ("prompt,ground_truth\nq,nan\n", "the ground truth of 1 rows is a word for a missing value"),
        ('{"prompt": "a", "prompt": "q"}\n', "twice, of which the last counts: prompt"),
        ('{"prompt": "q", "ground_truth": "1"}\n{"prompt": "q", "ground_truth": "2"}\n',
         "1 rows repeat an earlier prompt with another ground truth"),
        ('{"prompt": "q", "ground_truth": "", "data_source": "s"}\n', "s: 1 rows, 0 with a ground truth"),
        (json.dumps({"messages": [USER, ANSWER], "answer": "4"}) + "\n", 'data.map.ground_truth = "answer"'),
    ],
)  # fmt: skip
def test_data_check_says_what_is_odd(
    tmp_path: Path, content: str, note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / ("rows.jsonl" if content.startswith("{") else "rows.csv")
    path.write_text(content)
    assert main(["data-check", "--no-tests", str(path)]) == 0
    assert note in capsys.readouterr().out


def test_data_check_says_what_is_odd_about_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An end of turn that is no end token, two BOS, tokens beyond the embedding, and no false lost characters."""
    folder = write_folder(tmp_path / "m", TEMPLATES["qwen2.5"], eos_token="<|endoftext|>", unk_token="<|endoftext|>")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": 0, "vocab_size": 300}))
    path = write_rows(tmp_path, {"prompt": "q"})
    assert main(["data-check", "--no-tests", str(path), "--model", str(folder)]) == 0
    assert (
        "the chat template ends an answer with '<|im_end|>', in which none of the model's end tokens is"
        in capsys.readouterr().out
    )
    described = json.loads((folder / "tokenizer.json").read_text())
    single = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    described["post_processor"] = {
        "type": "TemplateProcessing", "single": [single, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(described))
    path = write_rows(tmp_path, {"prompt": "<|endoftext|>q"}, {"prompt": "z"})
    assert main(["data-check", "--no-tests", str(path), "--model", str(folder), "data.text_prompts=plain"]) == 0
    printed = capsys.readouterr().out
    assert "1 prompts begin with the token that begins a text twice" in printed
    assert "no token for these characters" not in printed
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": 0, "vocab_size": 70}))
    with pytest.raises(MalformedData, match=r"rows.jsonl:2: token 'z' has id \d+, and the model's vocabulary is 70"):
        prompt_set(path, ChatTokenizer.read(folder, needs_template=False), text_prompts="plain")


@pytest.mark.parametrize(
    ("row", "reply"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "no row is left: 1 have two equal answers"),
        ({"prompt": "q", "chosen": "a", "rejected": [{**ANSWER, "content": ""}]}, "1 of them: empty answer"),
        ({"prompt": [{**USER, "content": " "}], "chosen": "a", "rejected": "b"}, "1 of them: blank prompt"),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "weight": 0.3}, "column weight: expected true, false, 1 or 0"),
        ({"prompt": "q", "chosen": "a", "rejected": ""}, "column rejected: missing: its text is empty"),
        (
            {"prompt": "q ", "chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "content": "b"}]},
            "white space at their ends",
        ),
        ({"prompt": "q", "chosen": [{**ANSWER, "weight": 0}], "rejected": "b"}, "an answer to train"),
        (
            {"prompt": "q", "chosen": "[{'role': 'assistant', 'content': 'a'}]", "rejected": "b"},
            "column chosen: .* Python prints it",
        ),
    ],
)
def test_preferences_that_teach_nothing_are_explained(models: Any, tmp_path: Path, row: Any, reply: str) -> None:
    with pytest.raises(MalformedData, match=reply):
        pair_set(write_rows(tmp_path, row), models["qwen2.5"])
