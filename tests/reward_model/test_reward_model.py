"""A reward model as an endpoint, against what transformers computes for the same texts one at a time."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig, Qwen3Config

from penstock.protocol.errors import ConfigError
from penstock.reward_model.commands import ModelOptions
from penstock.reward_model.served_model import Classifier, Reading, Unusable, batches, fingerprint
from penstock.reward_service.endpoints.wire import GroupToScore
from tests.contracts.tiny_model import VOCAB, build_model, write_tokenizer
from tests.reward_service.processes import Process, Served

CONTEXT = 256
TEXTS = ["a", "hello world, what is 1 + 1?", "The answer is 2." * 5, "", "x" * 60, "hello"]


def build(folder: Path, kind: str = "qwen3", *, num_labels: int = 1, pad: int | None = 0, **settings: Any) -> Any:
    torch.manual_seed(7)
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.3,
        "num_labels": num_labels,
        "pad_token_id": pad,
    }
    config = (Qwen3Config if kind == "qwen3" else LlamaConfig)(**shape)
    model = AutoModelForSequenceClassification.from_config(config).float().eval()
    model.save_pretrained(folder)
    write_tokenizer(folder)
    if settings:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return model


def load(folder: Path, **changes: Any) -> Classifier:
    return Classifier(folder, ModelOptions(**{"batch_tokens": 100, **changes}))


def alone(model: Any, folder: Path, texts: Sequence[str]) -> list[list[float]]:
    """Return transformers' output for each text alone, without padding."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for text in texts:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        model.config.pad_token_id = next(token for token in range(VOCAB) if token not in ids)
        with torch.inference_mode():
            found.append(model(input_ids=ids).logits[0].float().tolist())
    return found


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("padding", ["own", "none", "end of text"])
def test_batches_give_what_each_text_gives_by_itself(kind: str, padding: str, tmp_path: Path) -> None:
    """Padding changes no number, whichever token pads, even the end-of-text token."""
    settings = {"own": {}, "none": {"pad_token": None}, "end of text": {"pad_token": "<|im_end|>"}}[padding]
    model = build(tmp_path, kind, **settings)
    texts = [text + ending for text in TEXTS if text for ending in ("", "<|im_end|>")]
    classifier = load(tmp_path)
    scored = classifier.score(texts, special_tokens=True)
    assert [one.score for one in scored] == pytest.approx([row[0] for row in alone(model, tmp_path, texts)], abs=2e-5)
    assert all(one.parts["num_tokens"] > 0 for one in scored)
    assert len({round(one.score or 0.0, 4) for one in scored}) > 5


def test_a_text_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    build(tmp_path)
    scored = load(tmp_path, max_length=20).score(["hello", "", "x" * 40], special_tokens=True)
    assert scored[0].score is not None
    assert [one.score for one in scored[1:]] == [None, None]
    assert "0 tokens" in (scored[1].error or "")
    assert "1 to 20" in (scored[2].error or "")
    assert load(tmp_path).max_length == CONTEXT


def test_with_several_labels_one_of_them_counts(tmp_path: Path) -> None:
    model = build(tmp_path, num_labels=3)
    (row,) = alone(model, tmp_path, ["hello"])
    (scored,) = load(tmp_path, label=2).score(["hello"], special_tokens=True)
    assert scored.score == pytest.approx(torch.tensor(row).softmax(-1)[2].item(), abs=1e-6)
    with pytest.raises(ConfigError, match="3 labels; choose one with --label"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="--label 3: the model has 3 labels"):
        load(tmp_path, label=3)


def test_bfloat16_is_near_float32(tmp_path: Path) -> None:
    """The same model in bfloat16 gives the same numbers to its precision, as float32 on the way out."""
    build(tmp_path)
    texts = [text for text in TEXTS if text]
    full = [one.score for one in load(tmp_path).score(texts, special_tokens=True)]
    half = [one.score for one in load(tmp_path, dtype="bfloat16").score(texts, special_tokens=True)]
    assert half == pytest.approx(full, abs=0.15)
    assert half != full


def test_a_folder_without_a_reward_model_is_refused(tmp_path: Path) -> None:
    """No folder, no head (transformers would draw one) and a length beyond the model are errors at the start."""
    with pytest.raises(ConfigError, match=r"config\.json: not readable"):
        load(tmp_path / "absent")
    build_model(tmp_path / "policy")
    with pytest.raises(ConfigError, match=r"the weights lack score\.weight"):
        load(tmp_path / "policy", label=1)
    build(tmp_path / "rm")
    with pytest.raises(ConfigError, match="limit of 256 tokens"):
        load(tmp_path / "rm", max_length=257)
    before = fingerprint(tmp_path / "rm")
    os.utime(tmp_path / "rm" / "model.safetensors", ns=(1, 1))
    assert fingerprint(tmp_path / "rm") != before


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("chat_template.jinja", "{{ 'a' * 10**11 ", "not valid Jinja"),
        ("tokenizer.json", '{"normalizer": {"type": "Prepend", "prepend": "%s"}, "model": {}}' % ("a" * 999), "up to"),
        ("config.json", '{"num_hidden_layers": -1}', "num_hidden_layers = -1"),
        ("config.json", '{"auto_map": {"AutoModelForSequenceClassification": "evil.M"}, "model_type": "evil"}', "evil"),
        ("adapter_config.json", "{}", "is an adapter"),
        ("tokenizer_config.json", "[]", "expected a JSON object"),
    ],
)  # fmt: skip
def test_a_hostile_folder_is_refused_as_the_trainer_refuses_it(
    tmp_path: Path, name: str, data: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No question whether to run its code is asked, also on a terminal, where the answer would be y."""
    build(tmp_path)
    (tmp_path / name).write_text(data)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
    with pytest.raises(ConfigError, match=reason):
        load(tmp_path)
    assert not (tmp_path / "mark").exists()


def test_a_chat_template_is_bounded_and_gives_what_transformers_gives(tmp_path: Path) -> None:
    build(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ eos_token }}{{ m.content }}"
        "{% if 'x' in m.content %}{{ 'a' * 10**11 }}{% endif %}\n{% endfor %}"
    )
    model, chat = load(tmp_path), [{"role": "user", "content": "hi"}]
    assert model.render(chat) == AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(chat, tokenize=False)
    with pytest.raises(Unusable, match="MiB of memory"):
        model.render([{"role": "user", "content": "x"}])


def test_batches_hold_everything_once_within_their_width() -> None:
    """Padding included, no batch is wider than asked, except for a single text that is."""
    lengths = [random.Random(3).randrange(1, 50) for _ in range(200)] + [400]
    found = batches(lengths, max_tokens=120)
    assert sorted(place for batch in found for place in batch) == list(range(201))
    widths = [max(lengths[place] for place in batch) * len(batch) for batch in found]
    assert sorted(widths)[-2] <= 120
    assert max(widths) == 400
    assert batches([], max_tokens=10) == []


def test_prompts_come_from_the_row_or_the_policys_text() -> None:
    """A column has a text or messages; a missing or invalid one is an error that names the columns."""

    def render(messages: list[dict[str, str]]) -> str:
        return "|".join(f"{message['role']}:{message['content']}" for message in messages)

    def group(**row: Any) -> GroupToScore:
        return GroupToScore(prompt="<user>hi", completions=["yes", "no"], extra_info=row)

    assert Reading("plain", render).texts(group()) == ["<user>hiyes", "<user>hino"]
    assert Reading("chat", render, "q").texts(group(q="hi"))[0] == "user:hi|assistant:yes"
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert Reading("chat", render, "q").texts(group(q=turns))[1] == "system:s|user:u|assistant:no"
    for row, form, text in [
        ({"a": 1}, "chat", "columns are a"),
        ({"q": [1]}, "chat", "neither a text"),
        ({"q": turns}, "plain", "plain"),
    ]:
        with pytest.raises(Unusable, match=text):
            Reading(form, render, "q").texts(group(**row))  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_folder_is_served_by_one_command(tmp_path: Path) -> None:
    """HTTP in, the numbers of direct transformers out, by the chat template; a row without its column is an error."""
    model = build(tmp_path / "rm")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "rm")
    process = Served(
        ["penstock.reward_model", str(tmp_path / "rm"), "--prompt-column", "question"], tmp_path / "serve.log"
    )
    try:
        url = process.url
        rows = [{"question": "1+1?"}, {"question": "hello"}, {}]
        texts = ["2", "two"]
        groups = [
            {"group_id": str(n), "prompt": "?", "completions": texts, "extra_info": row} for n, row in enumerate(rows)
        ]
        answer = httpx.post(url, json={"reward": "rm", "groups": groups}, timeout=60).raise_for_status().json()
        wanted = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": text}], tokenize=False
            )
            for row in rows[:2]
            for text in texts
        ]
        got = [score["score"] for result in answer["results"][:2] for score in result["scores"]]
        assert got == pytest.approx([row[0] for row in alone(model, tmp_path / "rm", wanted)], abs=2e-5)
        assert all("no column 'question'" in score["error"] for score in answer["results"][2]["scores"])
        figures = httpx.get(url.replace("/score", "/healthz"), timeout=60).json()["figures"]
        assert figures["texts"] == 4
    finally:
        process.kill()
    broken = Process(["penstock.reward_model", str(tmp_path / "absent")], tmp_path / "broken.log")
    assert broken.wait(60) == 1
    assert "config.json is missing" in broken.output
    assert "Traceback" not in broken.output


def test_a_missing_extra_is_named(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    hidden = "import sys; sys.modules['torch'] = None; from penstock.console.cli.main import main; main()"
    answer = subprocess.run(
        [sys.executable, "-c", hidden, "reward", "serve-model", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 1, answer.stderr
    assert "torch is not installed; pip install 'penstock[reward-model]'" in answer.stderr
