"""Chats become the same tokens as in transformers, from the files of the model folder alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from penstock.deploy.quickstart_task import write_model
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.trainer.errors import MalformedData, UnsupportedModel

QWEN_LIKE = (
    "{%- if messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{%- endif %}\n"
    "{%- for message in messages %}{% if loop.first and message.role == 'system' %}{% continue %}{% endif %}\n"
    "{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}"
    "{%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
    "{%- else %}{{ message.content | trim }}<|im_end|>{% endif %}{{ '\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = (
    "{{ bos_token }}{% for m in messages %}\n"
    "    {% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
CHATS = [
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": "Be <b>brief</b> & kind."}, {"role": "user", "content": "  1 + 1 =\n\n? "}],
    [
        {"role": "user", "content": "naïve 数学 🎉"},
        {"role": "assistant", "content": "well, <|im_end|> is a token"},
        {"role": "user", "content": "and now", "name": None},
    ],
    [
        {"role": "user", "content": "call it"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"x": "<é>"}}]},
        {"role": "tool", "content": "42"},
    ],
]


def write_folder(folder: Path, template: str, **config: object) -> Path:
    """Write a byte-level BPE tokenizer with a template, in the files that transformers writes."""
    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world, what is 1 + 1?", "user assistant system"] * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": {"content": "<|endoftext|>", "special": True, "__type": "AddedToken"},
        "chat_template": template,
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": 2}))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    write_model(base / "quickstart", seed=0)
    return {
        "quickstart": base / "quickstart",
        "qwen_like": write_folder(base / "qwen", QWEN_LIKE),
        "plain": write_folder(base / "plain", PLAIN),
    }


@pytest.fixture(scope="module")
def reference(folders: dict[str, Path]) -> dict[str, object]:
    from transformers import AutoTokenizer

    return {name: AutoTokenizer.from_pretrained(folder) for name, folder in folders.items()}


@pytest.mark.parametrize("name", ["quickstart", "qwen_like", "plain"])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_tokens_equal_those_of_transformers(folders, reference, name, chat, add_generation_prompt):
    tokenizer = ChatTokenizer.read(folders[name])
    text = tokenizer.render(chat, add_generation_prompt=add_generation_prompt)
    expected = reference[name]
    kwargs = {"add_generation_prompt": add_generation_prompt}
    assert text == expected.apply_chat_template(chat, tokenize=False, **kwargs)
    assert tokenizer.encode(text) == expected.apply_chat_template(chat, tokenize=True, return_dict=False, **kwargs)
    assert tokenizer.encode_many([text, "x"])[0] == tokenizer.encode(text)


def test_tokens_decode_to_their_text(folders):
    tokenizer = ChatTokenizer.read(folders["qwen_like"])

    @given(st.text(max_size=40))
    def check(text: str) -> None:
        assert tokenizer._tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text

    check()


def test_the_template_file_overrides_the_configuration(tmp_path: Path):
    """chat_template.jinja is preferred, and of several named templates the default one is used."""
    named: Any = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    folder = write_folder(tmp_path / "m", named)
    assert ChatTokenizer.read(folder).render(CHATS[0], add_generation_prompt=True) == "d"
    (folder / "chat_template.jinja").write_text("file")
    assert ChatTokenizer.read(folder).render(CHATS[0], add_generation_prompt=True) == "file"


def test_end_tokens_come_from_all_three_files(tmp_path: Path):
    """The tokenizer's eos comes first, then generation_config's, which overrules config's."""
    folder = write_folder(tmp_path / "m", PLAIN)
    assert ChatTokenizer.read(folder).eos_ids == (2,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    assert ChatTokenizer.read(folder).eos_ids == (2, 0)
    (folder / "generation_config.json").write_text("{}")
    write_folder(folder, PLAIN, eos_token=None)
    assert ChatTokenizer.read(folder).eos_ids == (2,)
    (folder / "config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="a completion would never end"):
        ChatTokenizer.read(folder)


@pytest.mark.parametrize(
    ("spoil", "reply"),
    [
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json: missing; save the model's tokenizer"),
        (lambda f: (f / "tokenizer_config.json").write_text("{}"), "no chat template; add chat_template.jinja"),
        (lambda f: (f / "chat_template.jinja").write_text("{% if %}"), "not valid Jinja"),
    ],
)
def test_an_unusable_folder_is_named_with_its_file(tmp_path: Path, spoil, reply: str):
    folder = write_folder(tmp_path / "m", PLAIN)
    spoil(folder)
    with pytest.raises(UnsupportedModel) as caught:
        ChatTokenizer.read(folder)
    assert reply in str(caught.value)
    with pytest.raises(UnsupportedModel, match="no such folder"):
        ChatTokenizer.read(tmp_path / "nowhere")


def test_a_chat_that_the_template_refuses_is_malformed_data(folders):
    tokenizer = ChatTokenizer.read(folders["plain"])
    with pytest.raises(MalformedData, match="chat template refuses the chat: no robots"):
        tokenizer.render([{"role": "robot", "content": "beep"}], add_generation_prompt=True)
