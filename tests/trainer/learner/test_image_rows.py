"""Packed rows with images have the log-probabilities and gradients of transformers on every row alone."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tests import episodes
from tests.groups import make_group
from tests.pictures import picture, picture_bytes
from tests.trainer.learner import forks
from tests.trainer.learner.tiny import HOW
from tests.vision_model import build_vision_model
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from penstock.protocol import blob_keys
from penstock.protocol.errors import BlobMissing, ImageRefused, PackError
from penstock.protocol.groups import BlobRef, ScoredGroup
from penstock.protocol.images import admission
from penstock.protocol.images.admission import AdmittedImage, admit
from penstock.protocol.images.processor import ImageProcessor, expanded, read_processor, rope_positions
from penstock.protocol.packs import group_pack
from penstock.protocol.trajectory import Group
from penstock.protocol.versions import PolicyVersion
from penstock.trainer.algorithm.algorithm_settings import AlgorithmSettings
from penstock.trainer.algorithm.batch import MicroBatch, PlacedImages, Row, StoredImage, build
from penstock.trainer.algorithm.objective import build_objective
from penstock.trainer.groups.pack_reader import PackReader
from penstock.trainer.learner.load_model import load_policy
from penstock.trainer.learner.logprobs import CompletionScorer, read_batch
from penstock.trainer.learner.vision import ImageReader, freeze_tower
from penstock.trainer.parallel_dims import ParallelDims, ParallelLayout
from penstock.trainer.ranks import Ranks

SIZES = [(40, 24), (24, 24), (70, 20), (16, 60)]


class Store:
    """Objects of images, and how often each was fetched."""

    def __init__(self, images: list[AdmittedImage]) -> None:
        self.objects = {blob_keys.image("r", image.sha256): image.data for image in images}
        self.fetched: Counter[str] = Counter()

    def get(self, ref: BlobRef) -> bytes:
        self.fetched[ref.key] += 1
        if ref.key not in self.objects:
            raise BlobMissing(ref.key)
        return self.objects[ref.key]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("vision") / "model"
    build_vision_model(made)
    return made


@pytest.fixture(scope="module")
def processor(folder: Path) -> ImageProcessor:
    found = read_processor(folder)
    assert found is not None
    return found


IMAGES = [admit(picture_bytes(picture(*size, seed=number))) for number, size in enumerate(SIZES)]


TWIN = admit(picture_bytes(picture(*SIZES[0], seed=9)))  # of the size of the first


def loaded(folder: Path) -> Qwen2_5_VLForConditionalGeneration:
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)


def make_row(processor: ImageProcessor, parts: list[Any], completion: list[int], weight: float = 0.5) -> Row:
    ids: list[int] = []
    shown: list[AdmittedImage] = []
    for part in parts:
        ids += [processor.image_token_id] if isinstance(part, AdmittedImage) else part
        shown += [part] if isinstance(part, AdmittedImage) else []
    whole, images = expanded(ids, shown, processor)
    tokens = np.array(whole + completion, dtype=np.int32)
    placed = None if images is None else PlacedImages("r", images)
    mask = np.arange(len(tokens)) >= len(whole)
    return Row(tokens, mask, np.zeros(len(tokens), np.float32), 0.5, weight, images=placed)


def some_rows(processor: ImageProcessor) -> list[Row]:
    """Groups that share prompts with images, one prompt with another picture in the same place, and text alone."""
    one, two, three, four = IMAGES
    rows = [make_row(processor, [[5, 6], one, [7], two, [8]], [10, 11, 12 + n], 0.1 + 0.2 * n) for n in range(3)]
    rows += [make_row(processor, [[5, 6], TWIN, [7], two, [8]], [10, 11, 12], 0.3)]  # the same tokens, another picture
    rows += [make_row(processor, [three, [9], one], [13, 14], 0.4), make_row(processor, [[5, 6, 7, 8]], [15, 16], 0.6)]
    rows += [make_row(processor, [[5], four, [20], four], [*range(30, 52), n], 0.2) for n in range(2)]
    return rows


def read(scorer: CompletionScorer, rows: list[Row], reader: ImageReader) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities of all sampled tokens, and the weighted loss."""
    batch = build(rows)
    images = batch.images
    if images is not None:
        images = replace(images, read=reader.patches)
    found = read_batch(scorer, replace(batch, images=images))
    return found, -(found * batch.weights).sum()


def alone(model: Any, row: Row, data: dict[str, bytes]) -> Tensor:
    """Return the log-probabilities of a row's sampled tokens as transformers computes them, from the bytes on."""
    ids = torch.from_numpy(row.token_ids.astype(np.int64))[None]
    given: dict[str, Any] = {}
    if row.images is not None:
        pictures = [Image.open(io.BytesIO(data[ref.sha256])) for ref in row.images.images.refs]
        own = Qwen2VLImageProcessorPil.from_pretrained(model.name_or_path)(images=pictures, return_tensors="pt")
        types = (ids == model.config.image_token_id).int()
        given = {
            "pixel_values": own["pixel_values"],
            "image_grid_thw": own["image_grid_thw"],
            "mm_token_type_ids": types,
        }
    logits = model(input_ids=ids, use_cache=False, **given).logits[0].float()
    where = torch.from_numpy(np.flatnonzero(row.loss_mask))
    return logits[where - 1].log_softmax(-1).gather(1, ids[0][where][:, None])[:, 0]


def test_a_packed_stream_equals_transformers_row_by_row(folder: Path, processor: ImageProcessor) -> None:
    """Log-probabilities to 1e-5, loss and every gradient, the vision tower's too; a picture is computed once."""
    rows = some_rows(processor)
    images = [*IMAGES, TWIN]
    store = Store(images)
    reader = ImageReader(store.get, processor)
    model = loaded(folder)
    tower_calls: list[Tensor] = []
    model.model.visual.register_forward_pre_hook(
        lambda _, args, kw: tower_calls.append(kw["grid_thw"]), with_kwargs=True
    )
    scorer = CompletionScorer(model, temperature=1.0)
    assert scorer.padding_reason is None
    found, loss = read(scorer, rows, reader)
    loss.backward()
    assert [len(grids) for grids in tower_calls] == [5]  # ten places in eight rows, five pictures
    assert set(store.fetched.values()) == {1}
    batch = build(rows)
    assert batch.input_ids.shape[1] < sum(len(row.token_ids) - 1 for row in rows)
    assert (batch.input_ids >= 0).all()
    plain = loaded(folder)
    data = {image.sha256: image.data for image in images}
    expected = [alone(plain, row, data) for row in rows]
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=1e-5)
    total = -sum((one.sum() * row.weight for one, row in zip(expected, rows, strict=True)), torch.zeros(()))
    torch.testing.assert_close(loss, total, rtol=1e-6, atol=1e-5)
    total.backward()
    gradients = dict(plain.named_parameters())
    assert any("visual" in name for name in gradients)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, gradients[name].grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_a_frozen_tower_has_no_gradient(folder: Path, processor: ImageProcessor) -> None:
    rows = some_rows(processor)
    reader = ImageReader(Store([*IMAGES, TWIN]).get, processor)
    both = []
    for frozen in (False, True):
        model = loaded(folder)
        if frozen:
            freeze_tower(model)
        _, loss = read(CompletionScorer(model, temperature=1.0), rows, reader)
        loss.backward()
        both.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in both[1].items():
        if "visual" in name:
            assert gradient is None
        else:
            torch.testing.assert_close(gradient, both[0][name], rtol=0, atol=0)


def test_a_sampled_token_with_the_id_of_an_image_is_an_ordinary_token(folder: Path, processor: ImageProcessor) -> None:
    """A policy with random weights samples it; transformers would count it among the images and refuse the row."""
    pad = processor.image_token_id
    row = make_row(processor, [[5], IMAGES[0], [6]], [pad, pad, 7])
    reader = ImageReader(Store(IMAGES).get, processor)
    model = loaded(folder)
    found, _ = read(CompletionScorer(model, temperature=1.0), [row], reader)
    batch = build([row])
    assert batch.images is not None
    assert len(batch.images.places) == row.images.images.num_tokens
    words = model.get_input_embeddings()(batch.input_ids)
    features = model.model.visual(
        torch.from_numpy(processor.process(IMAGES[0].data).pixel_values), grid_thw=batch.images.grid_thw
    ).pooler_output
    words = words.index_copy(1, batch.images.places, features[None])
    positions = torch.from_numpy(rope_positions(batch.input_ids.shape[1], row.images.images, processor.merge_size))[
        :, None
    ]
    hidden = model.model.language_model(inputs_embeds=words, position_ids=positions, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[0, batch.predictors])
    torch.testing.assert_close(found, logits.log_softmax(-1).gather(1, batch.targets[:, None])[:, 0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [*SIZES, (1, 1), (7, 300), (500, 33), (64, 64), (200, 150)])
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_the_processor_is_that_of_transformers_to_the_last_bit(
    folder: Path, processor: ImageProcessor, size: tuple[int, int], kind: str
) -> None:
    """Pixel values, grid and number of tokens, below, within and above the limits of pixels."""
    data = picture_bytes(picture(*size, seed=3), kind)
    found = processor.process(admit(data).data)
    own = Qwen2VLImageProcessorPil.from_pretrained(folder)(images=[Image.open(io.BytesIO(data))], return_tensors="np")
    assert own["image_grid_thw"].tolist() == [list(found.grid_thw)]
    np.testing.assert_array_equal(own["pixel_values"], found.pixel_values)
    assert found.num_tokens == len(found.pixel_values) // 4
    assert processor.grid_of(*admission.size_of(data)) == found.grid_thw


def test_positions_are_those_of_transformers(folder: Path, processor: ImageProcessor) -> None:
    """In all three directions, for rows of text and several images."""
    model = loaded(folder)
    for row in some_rows(processor):
        images = None if row.images is None else row.images.images
        ids = torch.from_numpy(row.token_ids.astype(np.int64))[None]
        grids = torch.tensor([ref.grid_thw for ref in images.refs]) if images is not None else None
        expected, delta = model.model.get_rope_index(ids, (ids == processor.image_token_id).int(), image_grid_thw=grids)
        found = rope_positions(len(row.token_ids), images, processor.merge_size)
        assert found.tolist() == expected[:, 0].tolist()
        assert found.max() + 1 == len(row.token_ids) + int(delta)


def test_an_image_is_what_its_row_says_or_is_refused(processor: ImageProcessor) -> None:
    """Another object under its key, another processor, another grid, an object that is missing."""
    row = make_row(processor, [[5], IMAGES[0], [6]], [7])
    assert row.images is not None
    images = row.images.images
    store = Store(IMAGES)
    stored = [StoredImage("r", images.refs[0])]
    reader = ImageReader(store.get, processor)
    reader.fetch(stored, images.processor)
    with pytest.raises(ImageRefused, match=f"by the image processor {'f' * 64}, this trainer has {images.processor}"):
        reader.fetch(stored, "f" * 64)
    other = stored[0]._replace(ref=stored[0].ref.model_copy(update={"num_tokens": 1}))
    with pytest.raises(ImageRefused, match="different image processors"):
        reader.patches(other)
    store.objects[blob_keys.image("r", IMAGES[0].sha256)] = IMAGES[1].data
    with pytest.raises(ImageRefused, match="it is another image"):
        ImageReader(store.get, processor).patches(stored[0])
    with pytest.raises(BlobMissing):
        ImageReader(Store([]).get, processor).fetch(stored, images.processor)


def image_group(processor: ImageProcessor, *, version: int = 0) -> Group:
    row = make_row(processor, [[5], IMAGES[0], [6]], [7])
    assert row.images is not None
    prompt = tuple(row.token_ids[:-1].tolist())
    made = make_group(size=2, prompt_ids=prompt, version=version)
    shown = [replace(trajectory, images=row.images.images) for trajectory in made.trajectories]
    return replace(made, trajectories=tuple(shown))


def test_a_group_whose_images_disagree_is_refused_when_it_arrives(processor: ImageProcessor) -> None:
    group = image_group(processor)
    data = group_pack.encode([group])
    pack = BlobRef(key=blob_keys.group_pack("r", PolicyVersion(0), "p", "a"), sha256="0" * 64, size_bytes=len(data))
    scored = ScoredGroup(generated=group.summary(0), rewards=(0.0, 1.0), scorer="a")

    def read(
        get: Any, own: ImageProcessor | None = processor, found: bytes = data, one: ScoredGroup = scored
    ) -> list[Group]:
        reader = None if own is None else ImageReader(get, own)
        return PackReader(lambda _: found, images=reader).read(pack, [one], ())

    store = Store(IMAGES)
    (arrived,) = read(store.get)
    assert arrived.image_processor == processor.sha256
    assert set(store.fetched.values()) == {1}  # both trajectories have it
    other = replace_processor(processor)
    for get, own, words in (
        (Store([]).get, processor, "runs/r/images/"),
        (store.get, None, "has images, and the model that is trained reads none"),
        (store.get, other, f"prepared by the image processor {processor.sha256}, this trainer has {other.sha256}"),
    ):
        with pytest.raises(PackError, match=rf"{group.group_id}.*{words}"):
            read(get, own)
    bare = replace(group, trajectories=tuple(replace(one, images=None) for one in group.trajectories))
    without = ScoredGroup(generated=bare.summary(0), rewards=(0.0, 1.0), scorer="a")
    with pytest.raises(PackError, match=r"tokens of images \(id \d+\) that were not sampled, and names images with 0"):
        read(store.get, processor, group_pack.encode([bare]), without)


def test_an_answer_that_rows_share_may_hold_the_id_of_an_image(processor: ImageProcessor) -> None:
    token = processor.image_token_id
    first = episodes.make_row([(0, [5]), (1, [token, 12])], text="x")
    rows = [
        episodes.make_row([(0, [5, token, 12, new]), (1, [14])], first_turn=1, parent=0, prefix_len=3)
        for new in (8, token)
    ]
    good, forged = (episodes.group_of(replace(episodes.one_turn(0), rows=(first, row))) for row in rows)
    reader = ImageReader(Store([]).get, processor)
    reader.check("r", good)
    with pytest.raises(PackError, match="names images with 0"):
        reader.check("r", forged)


def replace_processor(processor: ImageProcessor) -> ImageProcessor:
    """The same model's, with another limit."""
    return replace(processor, max_pixels=processor.max_pixels * 2)


LAYOUTS: dict[str, dict[str, Any]] = {
    "2": {"zero_stage": 2, "train_vision_tower": True, "gradient_checkpointing": True},
    "3-frozen": {"zero_stage": 3},
    "3": {"zero_stage": 3, "train_vision_tower": True},
}


def micro_batches(processor: ImageProcessor, dims: ParallelDims) -> list[MicroBatch]:
    """Return this rank's micro-batches: of two ranks, the second one has text alone."""
    of_images = [make_row(processor, [[5], *IMAGES[:2], [6, 7]], [10, 11, 12 + n], 0.1) for n in range(2)]
    of_images += [make_row(processor, [[5], IMAGES[0], [6, 7]], [13], 0.1)]
    of_text = [[make_row(processor, [[5, 6, 7]], answer, 0.1)] for answer in ([20, 21], [22], [23, 24, 25])]
    shares = [[of_images, of_text[0]], of_text[1:]]
    own = [piece for share in shares for piece in share] if dims.rows.count == 1 else shares[dims.rows.index]
    reader = ImageReader(Store(IMAGES).get, processor)
    found = [build(piece) for piece in own]
    return [b if b.images is None else replace(b, images=replace(b.images, read=reader.patches)) for b in found]


def main(arguments: Sequence[str]) -> int:
    """Train two steps of the model that is the argument in every layout; print losses, norms and weights."""
    model, dims, results = Path(arguments[0]), ParallelDims(Ranks(), ParallelLayout(1, 1)), {}
    processor = read_processor(model)
    assert processor is not None
    for name, changes in LAYOUTS.items():
        policy = load_policy(model, replace(HOW, **changes), dims, temperature=1.0)
        objective = build_objective(AlgorithmSettings())
        batches = micro_batches(processor, dims)
        steps = [policy.train_step(batches, objective) for _ in range(2)]
        results[name] = {
            "loss": [step.loss for step in steps],
            "norm": [step.grad_norm for step in steps],
            "weights": {key: float(tensor.double().norm()) for key, tensor in policy.weights.snapshot().items()},
        }
    if dims.ranks.is_leader:
        print(json.dumps(results))
    dims.ranks.leave(0)
    return 0


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_zero_2_and_3_on_two_ranks_equals_one_process(folder: Path, tmp_path: Path) -> None:
    """Where one rank has the images and the other has none, with a tower that learns and with a frozen one.

    A tower that ZeRO-3 has divided must be computed by both, and the other's text keep its gradient.
    """
    results = forks.results(tmp_path, __name__, str(folder), ranks=(1, 2))
    own = load_file(folder / "model.safetensors")
    norms = {name: float(tensor.double().norm()) for name, tensor in own.items()}
    for name, one in results[1].items():
        two = results[2][name]
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5), name
        assert two["norm"] == pytest.approx(one["norm"], rel=1e-4), name
        assert two["weights"] == pytest.approx(one["weights"], rel=1e-4), name
        assert two["weights"].keys() == own.keys()  # the names that transformers saves
        tower = {key: value for key, value in one["weights"].items() if key.startswith("visual.")}
        is_same = all(value == norms[key] for key, value in tower.items())
        assert is_same == name.endswith("-frozen"), name
