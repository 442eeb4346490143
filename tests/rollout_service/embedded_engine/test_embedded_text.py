"""The embedded engine's search for stop strings in the end of a completion, on the tokens of a real tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.contracts.tiny_model import write_tokenizer
from tokenizers import Tokenizer

from penstock.rollout_service.embedded_engine.http.bodies import SamplingParams
from penstock.rollout_service.embedded_engine.http.build_job import Text
from penstock.rollout_service.embedded_engine.http.generate_endpoints import completion_texts
from penstock.rollout_service.embedded_engine.sequence import FinishReason, Sampling, Sequence


@pytest.mark.parametrize("stop", ["</answer>", "停止生成停止生成停止生成停止生成", "✓" * 20])
def test_a_string_of_long_characters_is_found(stop: str, tmp_path: Path) -> None:
    """A character may take as many tokens as it has UTF-8 bytes."""
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    sequence = Sequence("r", (1,), Sampling(max_new_tokens=500, stop_strings=("nowhere", stop)))
    text = Text(tmp_path)
    tokens = [token for letter in f"so {stop}" for token in tokenizer.encode(letter).ids]
    sequence.output_ids = tokens[:-1]
    assert text.find_stop_string(sequence) is None
    sequence.output_ids = tokens
    assert text.find_stop_string(sequence) == stop


def test_an_untrimmed_text_is_that_of_all_tokens(tmp_path: Path) -> None:
    """With no_stop_trim the text holds what the last token says beyond the stop string, as SGLang's does."""
    write_tokenizer(tmp_path)
    vocabulary = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab()
    token, spelt = next(
        (token, text)
        for text, token in sorted(vocabulary.items())
        if text.isalpha() and text.isascii() and len(text) > 1
    )
    sequence = Sequence("r", (1,), Sampling(max_new_tokens=5, stop_strings=(spelt[0],)))
    sequence.output_ids = [token]
    sequence.finish = FinishReason("stop", matched=spelt[0])
    for params, text in ((SamplingParams(no_stop_trim=True), spelt), (SamplingParams(), "")):
        assert completion_texts([sequence], [params], Text(tmp_path)) == [text]
