"""Tokenizers from strangers: nothing is executed, nothing runs or grows without end, all errors are ours."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.tokenizer_file import check_tokenizer
from penstock.rollout_service.embedded_engine.http.build_job import Text
from penstock.rollout_service.engines.completion_sampler import Detokenizer
from penstock.rollout_service.teachers.teacher import TeacherUnfit, vocabulary_probe
from penstock.trainer.errors import MalformedData, UnsupportedModel

ROOT = Path(__file__).parents[3]


def edited(name: str, **values: object) -> Callable[[Path], object]:
    """Set keys of a JSON file."""

    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | values))

    return edit


def written(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data)


def added_token(token_id: int) -> Callable[[Path], object]:
    token = {"id": token_id, "content": "<x>", "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}  # fmt: skip

    def edit(folder: Path) -> None:
        content = json.loads((folder / "tokenizer.json").read_text())
        content["added_tokens"].append(token)
        (folder / "tokenizer.json").write_text(json.dumps(content))

    return edit


def _named_templates(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    edited("tokenizer_config.json", chat_template=[{"a": 1}, 7])(folder)


def vocabulary(change: Callable[[Any], object], **values: object) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        model = json.loads((folder / "tokenizer.json").read_text())["model"]
        edited("tokenizer.json", model=model | {"vocab": change(model["vocab"])} | values)(folder)

    return edit


def charsmap(longest: int) -> dict[str, Any]:
    table = (4).to_bytes(4, "little") + b"trie" + b"a\0" + b"b" * longest + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


def template_of(repeats: int, ids: int, key: str = "single") -> dict[str, Any]:
    pieces = [{"SpecialToken": {"id": "x", "type_id": 0}}] + [{"Sequence": {"id": "A", "type_id": 0}}] * repeats
    other = {"single": [], "pair": []} | {key: pieces}
    special = {"x": {"id": "x", "ids": [1] * ids, "tokens": ["x"] * ids}}
    return {"type": "TemplateProcessing", **other, "special_tokens": special}


def sequence(kind: str, key: str, *parts: object) -> dict[str, Any]:
    return {kind: {"type": "Sequence", key: list(parts)}}


BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}
META = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREPEND = {"type": "Prepend", "prepend": "▁"}
SPLIT = {"type": "Split", "pattern": {"Regex": "a" * 900}, "behavior": "Isolated", "invert": False}
ADDED = {"id": 5, "single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
EXPLODING: dict[str, tuple[dict[str, Any], str]] = {
    "prepended": ({"normalizer": PREPEND | {"prepend": "a" * 5_000_000}}, "makes texts up to 5000001"),
    "prepended often": (sequence("normalizer", "normalizers", *[PREPEND] * 20), "makes texts up to"),
    "nested": (
        sequence("normalizer", "normalizers", *[sequence("x", "normalizers", *[PREPEND] * 9)["x"]] * 2),
        "makes texts",
    ),
    "charsmap": ({"normalizer": charsmap(5_000_000)}, "makes texts up to"),
    "bytes of bytes": (sequence("pre_tokenizer", "pretokenizers", *[BYTES] * 20), "makes texts up to"),
    "metaspaces": (sequence("pre_tokenizer", "pretokenizers", *[META] * 20), "makes texts up to"),
    "normalized, then split": (
        {"normalizer": PREPEND | {"prepend": "a" * 40}, "pre_tokenizer": BYTES},
        "makes texts up to 82",
    ),
    "many parts": (sequence("normalizer", "normalizers", *[{"type": "NFC"}] * 100), "normalizer has 101 parts"),
    "long pattern": ({"normalizer": SPACES | {"pattern": {"Regex": "a" * 10**6}}}, "has a text of 1000000"),
    "decoder of suffixes": (
        sequence("decoder", "decoders", *[{"type": "BPEDecoder", "suffix": ""}] * 9),
        "decoder makes",
    ),
    "decoder with a text": (
        {"decoder": {"type": "WordPiece", "prefix": "a" * 9999, "cleanup": True}},
        "decoder has a text",
    ),
    "template of ids": ({"post_processor": template_of(1, 10**6)}, "post_processor adds 1000000 tokens"),
    "template that repeats": ({"post_processor": template_of(3, 1)}, "repeats a text 3 times"),
    "template in a sequence": (sequence("post_processor", "processors", BYTES, template_of(1, 10**5)), "adds 100000"),
    "template of pairs": ({"post_processor": template_of(99, 1, "pair")}, "repeats a text 99 times"),
    "template without tokens": ({"post_processor": template_of(1, 1) | {"special_tokens": {}}}, "not a tokenizer"),
    "long added token": ({"added_tokens": [ADDED | {"content": "a" * 10**6}]}, "a token of 1000000"),
    "many added tokens": ({"added_tokens": [ADDED | {"content": "a" * 2000}] * 5000}, "added tokens have 10000000"),
    "normalizer is a text": ({"normalizer": "NFC"}, "not a tokenizer"),
    "parts are a text": ({"normalizer": {"type": "Sequence", "normalizers": "NFC"}}, "not a tokenizer"),
}
USUAL: dict[str, dict[str, Any]] = {
    "Llama 2": sequence("normalizer", "normalizers", PREPEND, SPACES),
    "T5": {"normalizer": charsmap(18), "pre_tokenizer": META},
    "XLM-R": sequence("normalizer", "normalizers", charsmap(18), SPACES),
    "Qwen": sequence("pre_tokenizer", "pretokenizers", SPLIT, BYTES) | {"normalizer": {"type": "NFC"}},
    "DeepSeek": sequence("pre_tokenizer", "pretokenizers", SPLIT, SPLIT, SPLIT, BYTES),
    "Llama 3": sequence("post_processor", "processors", BYTES, template_of(1, 1)) | {"decoder": BYTES},
    "Gemma": {"normalizer": SPACES}
    | sequence("decoder", "decoders", SPACES, {"type": "ByteFallback"}, {"type": "Fuse"}),
    "BERT": {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}},
}


@pytest.mark.parametrize("name", USUAL)
def test_the_tokenizer_of_a_published_model_is_within_the_limits(model: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    edited("tokenizer.json", **USUAL[name])(folder)
    check_tokenizer(folder / "tokenizer.json")


def test_all_programs_read_tokenizers_with_the_same_check(model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    edited("tokenizer.json", **EXPLODING["prepended"][0])(folder)
    for read in (ChatTokenizer.read, Text, Detokenizer):
        with pytest.raises(UnsupportedModel, match="makes texts up to"):
            read(folder)
    with pytest.raises(TeacherUnfit, match="makes texts up to"):
        vocabulary_probe(folder)
    readers = subprocess.run(
        ["git", "grep", "-lE", r"Tokenizer\.from_(file|buffer)"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert [name for name in readers.stdout.split() if not name.startswith(("tests/", "benchmarks/"))] == [
        "protocol/tokenizer_file.py"
    ]


REPLACE: dict[str, Any] = {"type": "Replace", "pattern": {"String": "h"}, "content": "hhhhhhhhhh"}


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "list as token": (edited("tokenizer_config.json", eos_token=["a"]), "eos_token: expected a text"),
    "no content": (edited("tokenizer_config.json", eos_token={"x": 1}), "eos_token: expected a text"),
    "lone surrogate": (edited("tokenizer_config.json", eos_token="\ud800"), "surrogates not allowed"),
    "end as text": (edited("generation_config.json", eos_token_id="2"), "expected a token id"),
    "negative end": (edited("generation_config.json", eos_token_id=-1), "expected a token id"),
    "huge end": (edited("generation_config.json", eos_token_id=10**30), "expected a token id"),
    "end of none": (edited("generation_config.json", eos_token_id=[1, None]), "expected a token id"),
    "list as configuration": (written("generation_config.json", b"[1]"), "expected a JSON object, got list"),
    "nested": (written("tokenizer_config.json", b"[" * 100_000), "tokenizer_config.json: not JSON"),
    "panic": (edited("tokenizer.json", normalizer=charsmap(0) | {"precompiled_charsmap": "AAAA"}), "not a tokenizer"),
    "no model": (written("tokenizer.json", b"{}"), "not a tokenizer"),
    "no UTF-8": (written("tokenizer_config.json", b'{"a": "\xff"}'), "not JSON"),
    "template is no UTF-8": (written("chat_template.jinja", b"\xff\xfe"), "not UTF-8 text"),
    "named templates without names": (_named_templates, "no chat template"),
    "NUL": (written("tokenizer.json", b"\0" * 100), "not a tokenizer"),
    "nested tokenizer": (written("tokenizer.json", b"[" * 100_000), "not a tokenizer"),
    "negative token id": (added_token(-5), "not a tokenizer"),
    "huge token id": (added_token(2**40), "not a tokenizer"),
    "vocabulary without the end token": (edited("config.json", vocab_size=1), "would never end"),
    "negative vocabulary": (edited("config.json", vocab_size=-3), "expected a positive number"),
    "huge vocabulary": (edited("config.json", vocab_size=10**30), "expected a positive number"),
    "growing normalizer": (edited("tokenizer.json", normalizer={"type": "Sequence", "normalizers": [REPLACE] * 9}),
     "normalizer makes texts up to"),
    "decoder": (edited("tokenizer.json", decoder=REPLACE | {"content": "x" * 99}), "decoder makes"),
    **{name: (edited("tokenizer.json", **change), reason) for name, (change, reason) in EXPLODING.items()},
    "long token": (vocabulary(lambda vocab: vocab | {"a" * 20_000_000: 9999}), "a token of 20000000"),
    "long piece": (vocabulary(lambda vocab: [[text, 0.0] for text in vocab] + [["a" * 9999, 0.0]], type="Unigram"),
     "a token of 9999"),
    "prefix": (vocabulary(lambda vocab: vocab, continuing_subword_prefix="a" * 999), "adds up to 999"),
    "vocabulary is a number": (vocabulary(lambda vocab: 7), "not a tokenizer"),
    "twice": (written("tokenizer.json", b'{"model": {}, "normalizer": null, "normalizer": {}}'), "duplicate key"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_tokenizer_folder_is_refused(model: Path, tmp_path: Path, case: str) -> None:
    change, expected = HOSTILE[case]
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    change(folder)
    with pytest.raises(UnsupportedModel, match=expected):
        ChatTokenizer.read(folder)


def test_code_that_a_tokenizer_names_is_not_loaded(model: Path, tmp_path: Path) -> None:
    """auto_map and Python files are ignored: the files of `tokenizers` are read, and nothing else."""
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
    edited("tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Tok", None]}, tokenizer_class="Tok")(folder)
    ChatTokenizer.read(folder)
    assert not (tmp_path / "mark").exists()


def test_a_token_beyond_the_vocabulary_is_refused_where_a_text_has_it(model: Path, tmp_path: Path) -> None:
    """Published models have such tokens; a prompt that uses one would be an index error on the engine."""
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    added_token(1000)(folder)
    tokenizer = ChatTokenizer.read(folder)
    assert tokenizer.encode("1")
    for encode in (lambda: tokenizer.encode("1<x>"), lambda: tokenizer.encode_many(["1", "<x>"])):
        with pytest.raises(MalformedData, match=r"token '<x>' has id \d+, and the model's vocabulary is \d+"):
            encode()


def test_a_pattern_that_backtracks_without_end_is_an_error(model: Path, tmp_path: Path) -> None:
    """The Rust library gives up by a panic, which is no `Exception`."""
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    edited("tokenizer.json", normalizer={"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"})(folder)
    tokenizer = ChatTokenizer.read(folder)
    with pytest.raises(MalformedData, match="tokenizer fails"):
        tokenizer.encode("a" * 40 + "!")
    edited("tokenizer.json", model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "b"})(folder)
    with pytest.raises(MalformedData, match="tokenizer fails"):
        ChatTokenizer.read(folder).encode("c")
