"""Every family that people train, at its own shapes: rows, engine, versions, adapters, memory, or a refusal."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from penstock.deploy.plan.memory.model_shape import shape_of
from penstock.protocol.chat_tokenizer import model_context_tokens
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus
from penstock.protocol.versions import PolicyVersion
from penstock.protocol.weights.adapter_format import ADAPTER_CONFIG, ADAPTER_WEIGHTS, published_name
from penstock.protocol.weights.layout import BUCKET_BYTES
from penstock.protocol.weights.manifest import VersionManifest
from penstock.rollout_service.checks.check_weights import check_adapter
from penstock.rollout_service.embedded_engine.errors import UnsupportedModel as NotServed
from penstock.rollout_service.embedded_engine.model.model_config import read_model_config
from penstock.rollout_service.weights.mirror import Mirror
from penstock.trainer.algorithm.batch import MicroBatch, build
from penstock.trainer.connections import Connections
from penstock.trainer.errors import NotEstimated, UnsupportedModel
from penstock.trainer.learner import adapter
from penstock.trainer.learner.attention.backends import DenseMask
from penstock.trainer.learner.export import export_model
from penstock.trainer.learner.load_model import check_attention, load_language_model, load_policy
from penstock.trainer.learner.logprobs import CompletionScorer, read_batch
from penstock.trainer.learner.policy import Policy
from penstock.trainer.learner.policy_weights import WeightCopies
from penstock.trainer.learner.trainable import Optimisation
from penstock.trainer.parallel_dims import ParallelDims, ParallelLayout
from penstock.trainer.publishing.publish import Publisher
from penstock.trainer.publishing.weight_buckets import AdapterWeights, Snapshot
from penstock.trainer.ranks import Ranks
from tests.contracts.engine_under_test import embedded_engine
from tests.contracts.tiny_model import write_tokenizer
from tests.trainer.learner.tiny import HOW, row_of
from tests.zoo.families import FAMILIES, WHOLE, Family, write

PROMPTS = ((40, 12, 3), (9, 6, 2))  # tokens of a prompt, of each of its completions, and their number
LAYERS = {
    "attention": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "fused": ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"],
    "mlp": ["gate_proj", "up_proj", "down_proj"],
    "glu": ["gate_up_proj", "down_proj"],
}
TRAINED = [family for family in FAMILIES.values() if not family.is_refused]
AS_PUBLISHED = ("gemma2", "qwen3")  # compared with their whole vocabulary; make test-more NAME=zoo: all of them
each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
each_trained = pytest.mark.parametrize("family", TRAINED, ids=lambda family: family.name)
Folders = Callable[[Family], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folders]:
    base = tmp_path_factory.mktemp("zoo")
    yield cache(lambda family: write(family, base / f"{family.name}-{family.config['vocab_size']}"))
    shutil.rmtree(base)  # a gigabyte


def how(dtype: str = "float32", lora: adapter.Lora | None = None) -> Optimisation:
    return replace(HOW, dtype=dtype, lora=lora)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def dims() -> Iterator[ParallelDims]:
    """One rank in this process."""
    before, ranks = dict(os.environ), Ranks()
    yield ParallelDims(ranks, ParallelLayout(1, 1))
    ranks.leave(0)
    os.environ.clear()
    os.environ.update(before)


def scorer_of(folder: Path, dims: ParallelDims, dtype: str = "float32") -> CompletionScorer:
    """Load a model as the trainer does, in the mode in which it trains."""
    return CompletionScorer(load_language_model(folder, how(dtype), dims), 1.0).train()


def batch_of(family: Family) -> MicroBatch:
    rng, rows = np.random.default_rng(0), []
    for num_prompt, num_new, num_rows in PROMPTS:
        prompt = rng.integers(0, family.config["vocab_size"], num_prompt)
        for number in range(num_rows):
            rows.append(row_of(prompt, rng.integers(0, family.config["vocab_size"], num_new), 0.1 + 0.1 * number))
    return build(rows)


@each_family
def test_packed_rows_are_those_of_plain_transformers_or_refused(
    family: Family, folder_of: Folders, dims: ParallelDims, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients of rows that share prompts, beside each row alone with attention by its definition."""
    family = family if family.name in AS_PUBLISHED else family.with_few_tokens
    if family.is_refused:
        with pytest.raises(UnsupportedModel, match=family.rows.removeprefix("refused: ")):
            scorer_of(folder_of(family), dims)
        return
    scorer, batch = scorer_of(folder_of(family), dims), batch_of(family)
    assert scorer.padding_reason is None if family.rows == "packed" else family.rows in str(scorer.padding_reason)
    _refuse_the_definition(scorer, family, dims, monkeypatch)
    found = read_batch(scorer, batch)
    (found * batch.weights).sum().backward()
    plain = AutoModelForCausalLM.from_pretrained(folder_of(family), dtype=torch.float32, attn_implementation="eager")
    true = _row_by_row(plain, batch)
    (true * batch.weights).sum().backward()
    torch.testing.assert_close(found, true, rtol=0, atol=5e-5)
    expected = dict(plain.named_parameters())
    for name, parameter in scorer.language_model.named_parameters():
        gradient, true_gradient = parameter.grad, expected[name].grad
        assert gradient is not None, name
        assert true_gradient is not None, name
        assert float(torch.linalg.vector_norm(gradient - true_gradient, ord=torch.inf)) <= 3e-5, name


def _row_by_row(model: Any, batch: MicroBatch) -> Tensor:
    """Log-probabilities by the whole model of transformers, its head and what follows that included."""
    logits: dict[int, Tensor] = {}  # by place in the stream
    wanted, embedded = set(batch.predictors.tolist()), model.get_input_embeddings()(batch.input_ids)
    assert batch.layout is not None
    for row in batch.layout.rows():
        at = [number for number, place in enumerate(row.tolist()) if place in wanted - logits.keys()]
        inputs = embedded[:, torch.from_numpy(row)]
        found = model(inputs_embeds=inputs, use_cache=False, logits_to_keep=torch.tensor(at)).logits[0]
        logits |= {int(row[number]): one for number, one in zip(at, found, strict=True)}
    return -functional.cross_entropy(
        torch.stack([logits[n] for n in batch.predictors.tolist()]), batch.targets, reduction="none"
    )


def test_a_row_beyond_the_lengths_of_its_rotary_embeddings_is_refused(folder_of: Folders, dims: ParallelDims) -> None:
    """They are others for all of its tokens then, also those that an engine computed; the context ends there."""
    few = FAMILIES["phi3"].with_few_tokens
    limit = few.config["original_max_position_embeddings"]
    assert model_context_tokens(folder_of(few)) == limit < few.config["max_position_embeddings"]
    scorer = scorer_of(folder_of(few), dims)
    for length in (limit + 1, limit + 2):  # the last token is not computed
        batch = build([row_of(range(4), range(4, length), 1.0)])
        if length == limit + 1:
            assert bool(torch.isfinite(read_batch(scorer, batch)).all())
            continue
        with pytest.raises(
            UnsupportedModel, match=f"a row of {limit + 1} tokens, and the rotary embeddings of this model .longrope"
        ):
            read_batch(scorer, batch)


@each_trained
def test_bfloat16_is_computed_by_the_fast_attention_and_a_prompt_once(
    family: Family, folder_of: Folders, dims: ParallelDims, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never by the definition with its [T, T] matrices; padded only for the reason that the table has."""
    few, num_tokens = family.with_few_tokens, []
    scorer, batch = scorer_of(folder_of(few), dims, "bfloat16"), batch_of(few)
    _refuse_the_definition(scorer, family, dims, monkeypatch)
    first = scorer.language_model.base_model.layers[0]
    first.register_forward_pre_hook(lambda _, inputs: num_tokens.append(inputs[0].shape[0] * inputs[0].shape[1]))
    read_batch(scorer, batch).sum().backward()
    assert all(bool(torch.isfinite(weight.grad).all()) for weight in scorer.parameters())
    shared = sum(prompt + (new - 1) * rows for prompt, new, rows in PROMPTS)
    padded = sum(rows for *_, rows in PROMPTS) * max(prompt + new - 1 for prompt, new, _ in PROMPTS)
    assert num_tokens == [shared if family.rows == "packed" else padded]


def _refuse_the_definition(
    scorer: CompletionScorer, family: Family, dims: ParallelDims, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have the comparison at the start made, and then let the definition compute nothing."""
    used = check_attention(scorer.language_model, scorer.padding_reason, torch.device("cpu"), dims)
    assert used == ("cpu-flash" if family.rows == "packed" else "padded")
    monkeypatch.setattr(DenseMask, "attend", None)


@each_family
def test_the_embedded_engine_samples_what_the_trainer_computes_or_refuses_the_model(
    family: Family, folder_of: Folders, dims: ParallelDims, tmp_path: Path
) -> None:
    family = family if family.name in AS_PUBLISHED else family.with_few_tokens
    folder = folder_of(family)
    if family.engine:
        with pytest.raises(NotServed, match=family.engine):
            read_model_config(folder)
        return
    if not (folder / "tokenizer.json").exists():
        write_tokenizer(folder)
    prompt = np.random.default_rng(1).integers(0, family.config["vocab_size"], 20).tolist()
    with embedded_engine(folder, tmp_path, "--max-total-tokens", "400") as engine:
        replies = engine.generate([prompt], n=2, max_new_tokens=12, ignore_eos=True)
    rows = [row_of(prompt, reply["output_ids"], 1.0) for reply in replies]
    with torch.no_grad():
        computed = read_batch(scorer_of(folder, dims), build(rows))
    sampled = [item[0] for reply in replies for item in reply["meta_info"]["output_token_logprobs"]]
    assert sampled == pytest.approx(computed.tolist(), abs=5e-5)


@each_trained
def test_a_version_is_bit_for_bit_what_transformers_loads(
    family: Family, folder_of: Folders, dims: ParallelDims, bus: Bus, blobs: Blobs, run_streams: str, tmp_path: Path
) -> None:
    """Published whole, then as a patch, mirrored by a worker, under the names of the published files; exported, too."""
    folder = folder_of(family.with_few_tokens)
    policy = load_policy(folder, how("bfloat16"), dims, temperature=1.0)
    copies = WeightCopies(policy, dims, lambda: copies.root())  # noqa: PLW0108  it is not there before
    publisher, mirror = (
        Publisher(Connections(run_streams, bus, blobs), model_folder=folder),
        Mirror(blobs, tmp_path / "w", run_streams),
    )
    for version in range(2):
        weights = copies.copy(None, None, as_adapter=False, wanted=(), bucket_bytes=BUCKET_BYTES)
        publisher.submit(Snapshot(PolicyVersion(version), version, weights, "bfloat16", must_publish=True))
        publisher.wait_until_published(PolicyVersion(version), 60.0)
        head = publisher.versions.head.value
        assert head is not None
        mirrored = mirror.fetch(PolicyVersion(version), head.manifest, keep=[], newest=True)
        _assert_holds(mirrored.folder, policy)
        policy.weights.wait_until_read()
        _change_one_in_a_hundred(policy)
    publisher.close()
    assert VersionManifest.from_json(blobs.get(head.manifest)).kind == "patch"
    assert _tensors(mirrored.folder).keys() == _tensors(folder).keys()
    mirror.close()
    export_model(policy, dims, tmp_path / "exported", like=folder, verify=WHOLE)
    _assert_holds(tmp_path / "exported", policy)


def _change_one_in_a_hundred(policy: Policy) -> None:
    with torch.no_grad():
        for parameter in policy._scorer.parameters():
            parameter.view(-1)[::100] += 0.5


def _assert_holds(folder: Path, policy: Policy) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    loaded = model.state_dict()
    for name, tensor in policy._scorer.language_model.state_dict().items():
        assert torch.equal(tensor, loaded[name]), name


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@each_trained
def test_default_adapters_are_of_the_right_layers_and_change_what_is_served(
    family: Family, folder_of: Folders, dims: ParallelDims, tmp_path: Path
) -> None:
    """The worker accepts them, and peft computes with them what the trainer does."""
    few = family.with_few_tokens
    folder, batch = folder_of(few), batch_of(few)
    policy = load_policy(folder, how(lora=adapter.Lora(4, 8.0)), dims, temperature=1.0)
    policy.weights.check_adapters(())
    config = policy.weights.adapter_config()
    assert config is not None
    assert set(config.target_modules) == {name for kind in family.lora.split() for name in LAYERS[kind]}
    before = policy.logprobs(batch)
    draw = torch.Generator().manual_seed(1)
    for _, up, _ in adapter.factors(policy._scorer).values():
        torch.nn.init.normal_(up, std=0.1, generator=draw)
    factors = {published_name(name): factor for name, factor in policy.weights.adapter_tensors().items()}
    served = tmp_path / "adapter"
    served.mkdir()
    save_file(factors, served / ADAPTER_WEIGHTS)
    (served / ADAPTER_CONFIG).write_bytes(config.to_json())
    check_adapter(served, PolicyVersion(1), folder)
    if family.plan:
        assert shape_of(few.config, "config.json").adapter(4, ()) == sum(map(torch.numel, factors.values()))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = _row_by_row(PeftModel.from_pretrained(plain, str(served)), batch)
    torch.testing.assert_close(policy.logprobs(batch), expected, rtol=0, atol=5e-5)
    assert float((expected - before).abs().max()) > 5e-3  # logits of Granite are divided by 8
    if family.name == "qwen3":
        _assert_is_continued(folder, served, dims, batch, policy.logprobs(batch))


def _assert_is_continued(folder: Path, served: Path, dims: ParallelDims, batch: MicroBatch, expected: Tensor) -> None:
    """A training that begins with an adapter computes it, and publishes it, and not its base, before the first step."""
    begun = load_policy(folder, how(lora=adapter.Lora(4, 8.0, path=served)), dims, temperature=1.0)
    torch.testing.assert_close(begun.logprobs(batch), expected, rtol=0, atol=0)
    copies = WeightCopies(begun, dims, str)
    weights = copies.copy(None, None, as_adapter=True, wanted=(), bucket_bytes=BUCKET_BYTES)
    assert isinstance(weights, AdapterWeights)
    stored, found = load_file(served / ADAPTER_WEIGHTS), weights.buckets.tensors()
    assert stored.keys() == found.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in found.items())


@each_family
def test_memory_is_estimated_of_the_parameters_that_the_model_has_or_refused(
    family: Family, folder_of: Folders
) -> None:
    """How near the peaks are, `tests/deploy/plan` says of measured ones."""
    config = family.with_few_tokens.config
    if not family.plan:
        with pytest.raises(NotEstimated, match=f"model_type = {config['model_type']}: memory is estimated for"):
            shape_of(config, "config.json")
        return
    weights = _tensors(folder_of(family.with_few_tokens))
    assert shape_of(config, "config.json").parameters == sum(map(torch.numel, weights.values()))
