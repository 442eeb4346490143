"""Every form of row is recognised and read as documented; what is not read is said or refused, never dropped in silence."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pydantic import ValidationError
from tests.trainer.data.row_sets import ANSWER, USER, prompt_set, turn_set, write_rows
from tests.trainer.data.test_chat_template import PLAIN, write_folder

from penstock.deploy.data_check.commands import main
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.config.run_file import load
from penstock.protocol.errors import ConfigError
from penstock.trainer.data.data_order import DataOrder
from penstock.trainer.data.dataset import PromptSet
from penstock.trainer.data.read_rows import detect, prompt_row, rename, turn_rows
from penstock.trainer.data.row_files import open_rows
from penstock.trainer.errors import MalformedData, UnsupportedModel
from penstock.trainer.preflight import open_data
from penstock.trainer.settings import DataSettings, TrainerSettings

TEMPLATE = (
    "{{ '<think>' if enable_thinking }}{% for t in tools or [] %}{{ t.name }};{% endfor %}"
    "{% for m in messages if m.role != 'tool' %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("m") / "model", TEMPLATE)


def opened(path: Path, model: Path, **data: Any) -> PromptSet:
    needs_template, arguments = data.get("text_prompts") != "plain", data.get("template_arguments", {})
    return prompt_set(path, ChatTokenizer.read(model, arguments=arguments, needs_template=needs_template), **data)


def read(row: dict[str, Any], **data: Any) -> Any:
    settings = DataSettings.model_validate(data)
    return prompt_row(rename(row, settings, nested_texts=False), settings)


@pytest.mark.parametrize(
    ("row", "form", "contents", "truth", "source", "extra", "answer"),
    [
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "id": 7},
         "sharegpt", ["q"], None, "", {"id": 7}, "a"),
        ({"conversations": json.dumps([USER, ANSWER])}, "sharegpt", ["q"], None, "", {}, "a"),
        ({"messages": json.dumps([USER, ANSWER]), "prompt": "not this"}, "messages", ["q"], None, "", {}, "a"),
        ({"instruction": "q", "input": "x", "output": "a"}, "alpaca", ["q\nx"], None, "", {}, "a"),
        ({"instruction": "q", "input": "", "output": "a", "history": [["b", "c"]]},
         "alpaca", ["b", "c", "q"], None, "", {}, "a"),
        ({"input": "q", "label": "3", "datasource": "gsm8k", "k": 1}, "openrlhf", ["q"], '"3"', "gsm8k", {"k": 1}, None),
        ({"input": [USER], "output": "a"}, "openrlhf", ["q"], None, "", {}, "a"),
    ],
)  # fmt: skip
def test_the_forms_of_other_projects_are_read(row, form, contents, truth, source, extra, answer):
    """ShareGPT, Alpaca, OpenRLHF and messages as JSON text give prompt, ground truth, source and the answer to imitate."""
    data = DataSettings()
    row = rename(row, data, nested_texts=False)
    assert detect(row).name == form
    prompt = prompt_row(row, data)
    assert [message["content"] for message in prompt.chat] == contents
    assert (prompt.ground_truth, prompt.data_source, json.loads(prompt.extra_info)) == (truth, source, extra)
    if answer is not None:
        turn = turn_rows(row, data)[-1]
        assert [message["content"] for message in turn.chat] == [*contents, answer]
        assert turn.chat[-1]["role"] == "assistant"


@pytest.mark.parametrize(
    ("row", "reply"),
    [
        (
            {"prompt": "q", "chosen": "a", "rejected": "b"},
            'column chosen: a preference.* set data.ignore = \\["chosen", "rej',
        ),
        ({"prompt": "q", "completion": "a", "label": False}, "column label: tells good completions from bad ones"),
        ({"prompt": "q", "self_play": True}, 'column self_play: .* "pairwise" .* data.ignore = \\["self_play"\\]'),
        ({"prompt": "<image> q", "images": ["a.png"]}, 'column images: .* text alone.* data.ignore = \\["images"\\]'),
        ({"messages": [{"role": "bot", "content": "x"}, USER]}, r"column messages\[0\].role: .* data.roles.bot"),
        (
            {"messages": [{"role": "api_result", "content": "x"}, USER]},
            r'column messages.*data.roles.api_result = "tool"',
        ),
        (
            {"conversations": [{"from": "x", "value": "y"}]},
            r"column conversations\[0\].from: expected one of the roles",
        ),
        (
            {"conversations": [{"from": "human", "value": 3}]},
            r"column conversations\[0\].value: expected a text, got 3",
        ),
        ({"instruction": "q", "history": [["a"]]}, r"column history\[0\]: expected a pair of texts"),
        ({"text": "only text"}, "no format recognised from the columns text"),
    ],
)
def test_what_cannot_be_read_is_refused_with_line_and_column(tmp_path: Path, model: Path, row: dict, reply: str):
    """Preferences, images, unknown roles: refused with file, line, column and the setting that reads the rest, for both uses."""
    path = write_rows(tmp_path, {"prompt": "fine", "completion": "x"}, row)
    with pytest.raises(MalformedData, match=f"rows.jsonl:2: {reply}"):
        opened(path, model)
    with pytest.raises(MalformedData, match=f"rows.jsonl:2: {reply}"):
        turn_set(path, ChatTokenizer.read(model))


def test_the_offered_settings_read_the_rest():
    """data.ignore and data.roles, which the refusals name, read the rows."""
    pair = {"prompt": "q", "chosen": "a", "rejected": "b", "images": ["x"]}
    ignored = read(pair, ignore=["chosen", "rejected", "images"])
    assert (ignored.chat[0]["content"], ignored.extra_info) == ("q", "{}")
    chosen = DataSettings(map={"response": "chosen"}, ignore=["rejected", "images"])
    assert turn_rows(rename(pair, chosen, nested_texts=False), chosen)[0].chat[-1]["content"] == "a"
    assert (
        read({"messages": [{"role": "bot", "content": "x"}, USER]}, roles={"bot": "assistant"}).chat[0]["role"]
        == "assistant"
    )
    with pytest.raises(ValueError, match=r"data.ignore leaves out a, which data.map reads"):
        DataSettings(map={"prompt": "a"}, ignore=["a"])


def test_a_last_answer_is_said_or_becomes_the_ground_truth(tmp_path: Path, model: Path):
    """Chats that end with an answer are counted as such; one setting makes the answer, or a completion, the ground truth."""
    path = write_rows(tmp_path, {"messages": [USER, ANSWER]}, {"messages": [USER]}, {"prompt": "q", "completion": "a"})
    [notes] = opened(path, model).notes
    assert notes.answers_unused == 1
    assert "the last answer of 1 rows is not used" in "\n".join(notes.describe())
    loaded = opened(path, model, answer_is_ground_truth=True)
    assert [loaded[n].reward.ground_truth for n in range(3)] == ['"a"', None, '"a"']
    assert "not used" not in "\n".join(loaded.notes[0].describe())
    given = {"messages": [USER, ANSWER], "ground_truth": "given"}
    assert read(given, answer_is_ground_truth=True).ground_truth == '"given"'


def test_every_column_has_its_use(tmp_path: Path, model: Path):
    row = {
        "prompt": "q",
        "completion": "a",
        "data_source": "d",
        "level": 3,
        "ground_truth": "g",
        "tools": [{"name": "f"}],
    }
    [notes] = opened(write_rows(tmp_path, row), model).notes
    assert notes.describe()[0] == (
        "format trl: prompt from prompt; ground truth from ground_truth; data source from data_source; "
        "for the reward only level, tools; not used: completion"
    )
    turns = turn_set(tmp_path / "rows.jsonl", ChatTokenizer.read(model))
    assert turns.notes[0].columns("answer") == ["completion"]
    assert turns.notes[0].columns("unused") == ["data_source", "ground_truth", "level", "tools"]
    assert any("data.use_tools = true" in hint for hint in notes.hints())
    assert "f;[user] q" in opened(tmp_path / "rows.jsonl", model, use_tools=True)[0].text


def test_texts_are_read_with_or_without_the_template(tmp_path: Path, model: Path):
    """A text is a user message, or with "plain" the prompt itself, for GRPO and SFT; the notes offer the other reading."""
    path = write_rows(tmp_path, {"prompt": "Once upon", "completion": " a time"})
    templated = opened(path, model)
    assert templated[0].text == "[user] Once upon\n[assistant] "
    assert any('data.text_prompts = "plain"' in hint for hint in templated.notes[0].hints())
    plain = opened(path, model, text_prompts="plain")
    tokenizer = ChatTokenizer.read(model)
    assert (plain[0].text, list(plain[0].token_ids)) == ("Once upon", tokenizer.encode("Once upon"))
    turn = turn_set(path, tokenizer, text_prompts="plain")[0]
    assert turn.token_ids[~turn.loss_mask].tolist() == tokenizer.encode("Once upon")
    assert turn.token_ids[turn.loss_mask].tolist() == [*tokenizer.encode(" a time"), tokenizer.eos_ids[0]]
    with pytest.raises(MalformedData, match="column system: expected none beside a plain text prompt"):
        read({"prompt": "q", "system": "s"}, text_prompts="plain")
    with pytest.raises(ValueError, match=r"data.system_prompt has no place"):
        DataSettings(text_prompts="plain", system_prompt="s")


def test_a_json_text_of_a_chat_is_offered_as_a_chat(tmp_path: Path, model: Path):
    path = write_rows(tmp_path, {"prompt": json.dumps([USER])})
    loaded = opened(path, model)
    assert "role" in loaded[0].text
    assert any('data.map.messages = "prompt"' in hint for hint in loaded.notes[0].hints())
    assert opened(path, model, map={"messages": "prompt"})[0].text == "[user] q\n[assistant] "


def test_arguments_reach_the_template(tmp_path: Path, model: Path):
    """data.template_arguments are the template's variables; one that it does not read, or that is taken, is refused."""
    path = write_rows(tmp_path, {"prompt": "q"})
    assert opened(path, model, template_arguments={"enable_thinking": True})[0].text.startswith("<think>")
    assert not opened(path, model, template_arguments={"enable_thinking": False})[0].text.startswith("<think>")
    with pytest.raises(
        UnsupportedModel, match=r"data.template_arguments.enable_thinkin does nothing: .* does not read"
    ):
        opened(path, model, template_arguments={"enable_thinkin": False})
    with pytest.raises(ValueError, match=r"data.template_arguments.tools is set by Penstock"):
        DataSettings(template_arguments={"tools": 1})


def test_a_message_that_the_template_leaves_out_is_said(tmp_path: Path, model: Path):
    row = {"messages": [USER, ANSWER, {"role": "tool", "content": "42"}, USER], "weight": 0}
    row["messages"][0] = {**USER, "weight": 0}
    hints = opened(write_rows(tmp_path, row), model).notes[0].hints()
    assert "the model's chat template leaves out the tool message of 1 rows, or changes its text" in hints
    assert "keys of messages that only the chat template may read: weight" in hints


def test_a_base_model_needs_no_template_for_plain_texts(tmp_path: Path):
    """Without a template the refusal names the setting; with it texts are read, and a chat is refused with its line."""
    model = write_folder(tmp_path / "base", PLAIN)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "chat_template"}))
    with pytest.raises(
        UnsupportedModel, match=r'no chat template; add .* data.text_prompts = "plain" needs no template'
    ):
        opened(write_rows(tmp_path, {"prompt": "q"}), model)
    assert opened(tmp_path / "rows.jsonl", model, text_prompts="plain")[0].text == "q"
    with pytest.raises(MalformedData, match=r"rows.jsonl:2: the prompt is a chat, and the model has no chat template"):
        opened(write_rows(tmp_path, {"prompt": "q"}, {"prompt": [USER]}), model, text_prompts="plain")


def with_context(folder: Path, model: Path, tokens: int) -> Path:
    folder = write_folder(folder, TEMPLATE)
    config = json.loads((folder / "config.json").read_text()) if (folder / "config.json").is_file() else {}
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": tokens}))
    return folder


def test_a_prompt_too_long_for_the_model_is_found(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]):
    """`data check --model` lists it as a bad row, or says how many rows training leaves out; training drops and counts it."""
    small = with_context(tmp_path / "small", model, 60)
    path = write_rows(tmp_path, {"prompt": "short"}, {"prompt": "long " * 60})
    assert main(["data-check", "--no-tests", str(path), "--model", str(small)]) == 1
    assert "rows.jsonl:2: " in (printed := capsys.readouterr().out)
    assert "tokens, and the model's context has 60; shorten the prompt" in printed
    loaded = opened(path, small)
    assert (len(loaded), loaded.dropped) == (1, {"overlong": 1})
    with pytest.raises(MalformedData, match=r"rollout.max_new_tokens = 60 leaves no room for a prompt"):
        opened(path, small, max_new_tokens=60)
    arguments = ["data-check", str(path), "--model", str(model), "data.max_prompt_tokens=40"]
    assert main(arguments) == 0
    assert "1 rows are left out by data.max_prompt_tokens = 40, the first is" in capsys.readouterr().out


def test_the_evaluation_set_is_not_cut(tmp_path: Path, model: Path):
    """data.max_samples counts training rows only, also as verl's data.train_max_samples."""
    with_context(tmp_path / "whole", model, 4096)
    path = write_rows(tmp_path, *[{"prompt": "q", "ground_truth": str(n), "data_source": "s"} for n in range(5)])
    overrides = [
        f"model.path={tmp_path / 'whole'}",
        f"data.train={path}",
        f"data.eval={path}",
        "data.train_max_samples=2",
    ]
    data = open_data(load(TrainerSettings, overrides=overrides).settings)
    assert data.train is not None
    assert (len(data.train), [len(source.prompts) for source in data.eval]) == (2, [5])
    overrides[-1] = "data.train_max_samples=-1"
    assert load(TrainerSettings, overrides=overrides).settings.data.max_samples is None, "-1 means all rows in verl"


def test_data_check_reads_a_run_file(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]):
    small = with_context(tmp_path / "small", model, 60)
    path = write_rows(tmp_path, {"prompt": "q" * 4}, {"prompt": [USER] * 6})
    run_file = tmp_path / "run.toml"
    run_file.write_text(f'[model]\npath = "{small}"\n[data]\ntrain = "{path}"\n[rollout]\nmax_new_tokens = 20\n')
    assert main(["data-check", "--no-tests", "--run", str(run_file), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["rows"], report["overlong"]) == (2, 1)
    assert report["columns"]["grpo"] == {"prompt": ["prompt"]}
    assert main(["data-check", "--no-tests", str(path), 'data.ignore=["prompt"]']) == 1
    assert main(["data-check"]) == 2


@pytest.mark.parametrize("is_file", [True, False])
def test_arrow_files_are_read(tmp_path: Path, is_file: bool):
    """Both Arrow layouts are rows, as `save_to_disk` of the datasets library writes them; a damaged one is refused."""
    table = pa.Table.from_pylist([{"prompt": "aaaa", "x": None}, {"prompt": "bbbb", "x": 1}])
    path = tmp_path / "data-00000-of-00001.arrow"
    with pa.OSFile(str(path), "wb") as sink:
        new = pa.ipc.new_file if is_file else pa.ipc.new_stream
        with new(sink, table.schema) as writer:
            writer.write_table(table)
    rows = open_rows(path)
    assert [rows.row(n) for n in range(len(rows))] == [{"prompt": "aaaa"}, {"prompt": "bbbb", "x": 1}]
    good, offsets = path.read_bytes(), struct.pack("<3i", 0, 4, 8)
    assert offsets in good
    path.write_bytes(good.replace(offsets, struct.pack("<3i", 0, 4, 2**30)))  # texts beyond the end of the file
    with pytest.raises(MalformedData, match="not a readable Arrow file"):
        open_rows(path)
    path.write_bytes(good[: len(good) // 2])
    with pytest.raises(MalformedData, match="not a readable Arrow file"):
        open_rows(path)


def test_unknown_formats_are_refused_in_settings():
    with pytest.raises(ConfigError, match=r"data.format"):
        load(TrainerSettings, overrides=["model.path=m", "data.format=dpo"])


def test_the_forms_read_before_are_read_as_before(tmp_path: Path, model: Path):
    """Prompts, ground truths and extra_info of the five older forms, and the order, are those of earlier releases (literal)."""
    rows = (
        {
            "data_source": "s",
            "prompt": [USER],
            "reward_model": {"style": "rule", "ground_truth": "1"},
            "extra_info": {"i": 3},
        },
        {"prompt": "q", "ground_truth": "1", "data_source": "sort", "x": [1]},
        {"prompt": "q", "completion": "a", "label": 3, "system": "be"},
        {"messages": [USER, ANSWER], "tools": [{"n": 1}], "input": "i"},
        {"question": "q", "answer": "a", "instruction": "z"},
        {"prompt": json.dumps([USER]), "response": "b", "conversations": [1], "images": []},
    )
    loaded = opened(write_rows(tmp_path, *rows), model)
    order = DataOrder(len(loaded), seed=5)
    found = [
        (loaded[n].text, loaded[n].reward.model_dump_json()) for n in (order.at(k).prompt for k in range(len(rows)))
    ]
    assert (
        hashlib.sha256(repr((found, loaded.fingerprint)).encode()).hexdigest()
        == "548cb16361d31da54b4a0a87b27bed3d9ef8fade814ef80d1208a8e037fb0189"
    )


OWN_FORMAT = """
from penstock.trainer.row_format import RowFormat

exam = RowFormat(name="exam", columns="task, solution", required=("task", "solution"), prompt="task", ground_truth="solution")
"""


def test_a_form_of_ones_own_is_read_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named in ``data.format``; its file is run when rows are read, and not when settings are."""
    monkeypatch.chdir(tmp_path)
    settings = {"format": "exam.py:exam"}
    DataSettings.model_validate(settings)  # the file does not exist yet
    (tmp_path / "exam.py").write_text(OWN_FORMAT)
    prompt = read({"task": "2+2?", "solution": "4", "level": 3}, **settings)
    assert [message["content"] for message in prompt.chat] == ["2+2?"]
    assert (prompt.ground_truth, json.loads(prompt.extra_info)) == ('"4"', {"level": 3})
    with pytest.raises(MalformedData, match="column solution: missing in a row of format exam"):
        read({"task": "2+2?"}, **settings)
    with pytest.raises(ValidationError, match="did you mean 'sharegpt'"):
        DataSettings.model_validate({"format": "sharegtp"})
