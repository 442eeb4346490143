"""Where a stop string ends a completion, whatever the engine did: on texts of a real tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.contracts.tiny_model import write_tokenizer

from penstock.protocol.groups import Sampling
from penstock.protocol.versions import PolicyVersion, VersionRun
from penstock.rollout_service.checks.check_task import ModelLimits
from penstock.rollout_service.engines.completion import Completion, Resumption
from penstock.rollout_service.engines.completion_sampler import (
    AdapterTable,
    CompletionSampler,
    RequestDeadline,
    SampleRequest,
)
from penstock.rollout_service.engines.stop_strings import Detokenizer, first_end
from penstock.rollout_service.errors import EngineMisconfigured

EOS = 2  # "<|im_end|>", a special token


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


def spelt(folder: Path, text: str) -> list[int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [token for letter in text for token in tokenizer.encode(letter).ids]


async def complete(folder: Path, parts: Sequence[Sequence[int]], stop: tuple[str, ...]) -> Completion:
    """Return what becomes of an engine's replies to one sequence: one part a version, all but the last aborted."""
    limit = sum(map(len, parts))
    replies = iter(enumerate(parts))

    async def sample(sequences: Sequence[Resumption], request: SampleRequest) -> list[Completion]:
        assert request.sampling.stop == stop
        number, tokens = next(replies)
        is_last = number == len(parts) - 1
        reason = ("stop" if tokens[-1] == EOS else "length") if is_last else "abort"
        runs = (VersionRun(PolicyVersion(number), 0, len(tokens)),)
        return [Completion(list(tokens), [-float(token) for token in tokens], runs, reason, "not read")]

    sampler = CompletionSampler("http://engine", sample, AdapterTable(), RequestDeadline(5.0))
    sampler.folder = folder
    [[one]] = await sampler.generate([[5]], Sampling(max_new_tokens=limit, stop=stop), 1, None, ModelLimits(None, None))
    return one


@pytest.mark.parametrize(
    ("parts", "stop", "text", "finish"),
    [
        (["so <answer>4</answer> and on"], ("</answer>", "nowhere"), "so <answer>4</answer>", "stop"),
        (["4</ans", "wer> and on"], ("</answer>",), "4</answer>", "stop"),  # each request sees its own part only
        (["4</a>5", "6"], ("</a>",), "4</a>", "stop"),  # a part beyond the string leaves no run
        (["4</a>"], ("</a>",), "4</a>", "stop"),  # the engine reports the limit of tokens, which it has reached too
        (["4</ans"], ("</answer>",), "4</ans", "length"),
    ],
)
async def test_a_completion_ends_with_the_string(
    folder: Path, parts: list[str], stop: tuple[str, ...], text: str, finish: str
) -> None:
    """Tokens beyond it are dropped; those before keep their log-probabilities and the versions of their parts."""
    one = await complete(folder, [spelt(folder, part) for part in parts], stop)
    assert (one.text, one.token_ids, one.finish_reason) == (text, spelt(folder, text), finish)
    assert one.logprobs == [-float(token) for token in one.token_ids]
    first = min(len(spelt(folder, parts[0])), len(one.token_ids))
    runs = [VersionRun(PolicyVersion(0), 0, first), VersionRun(PolicyVersion(1), first, len(one.token_ids))]
    assert one.version_runs == tuple(run for run in runs if run.start < run.end)


async def test_without_the_string_the_end_is_the_engines(folder: Path) -> None:
    tokens = [*spelt(folder, "4</ans"), EOS]
    one = await complete(folder, [tokens], ("</answer>",))
    assert (one.text, one.token_ids, one.finish_reason) == ("4</ans", tokens, "stop")


async def test_the_text_of_a_special_token_can_be_given(folder: Path) -> None:
    tokens = [*spelt(folder, "4"), EOS, *spelt(folder, "5")]
    one = await complete(folder, [tokens], ("<|im_end|>",))
    assert (one.token_ids, one.text) == (tokens[:-1], "4")


def test_a_character_of_several_tokens_counts_when_it_is_whole(folder: Path) -> None:
    tokens = spelt(folder, "a✓b")
    decode = Detokenizer(folder)
    assert len(tokens) == 5
    assert first_end(tokens, ("✓",), lambda ids: decode.decode(ids, skip_special_tokens=False)) == 4


async def test_a_model_without_a_tokenizer_is_an_error_with_the_setting(tmp_path: Path) -> None:
    """Strings cannot be found in tokens that nothing decodes."""
    with pytest.raises(EngineMisconfigured, match=r"rollout\.stop needs one"):
        await complete(tmp_path, [[7, 8]], ("x",))
