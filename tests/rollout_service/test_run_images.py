"""The images of tasks: read from S3, verified, kept within bounds; what engine and trainer would see differently is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.protocol import blob_keys
from penstock.protocol.groups import ImageRef, RewardRequest, RowImages, Sampling, Task
from penstock.protocol.images.admission import admit
from penstock.protocol.images.processor import expanded, read_processor
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.versions import PolicyVersion, VersionRun
from penstock.rollout_service.engines.completion import Completion
from penstock.rollout_service.engines.engine_client import ImagePrompt
from penstock.rollout_service.engines.sglang.client import SglangClient
from penstock.rollout_service.engines.vllm.client import VllmClient
from penstock.rollout_service.environments.single_turn import SingleTurn
from penstock.rollout_service.errors import TaskRefused
from penstock.rollout_service.run_images import RunImages
from tests.agents.proxy.agent_model import SMOLLM2, write_model
from tests.pictures import picture, picture_bytes
from tests.rollout_service.vision_folder import write_vision_folder

CAT, DOG = picture_bytes(picture(24, 24)), picture_bytes(picture(32, 16, seed=1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_folder(tmp_path_factory.mktemp("vision"))


def task_with(folder: Path, *images: bytes, **changes: Any) -> Task:
    processor = read_processor(folder)
    assert processor is not None
    ids, found = expanded(
        [5, *[processor.image_token_id] * len(images), 6], [admit(image) for image in images], processor
    )
    fields: dict[str, Any] = {
        "group_id": "r:0:0", "prompt_ids": tuple(ids), "prompt_text": "", "group_size": 2, "sampling": Sampling(max_new_tokens=4),
        "reward": RewardRequest(name="x"), "split": "train", "issued_version": 0, "images": found,
    }  # fmt: skip
    return Task(**fields | changes)


def put(blobs: Blobs, run_id: str, *images: bytes) -> None:
    for one in map(admit, images):
        blobs.put(blob_keys.image(run_id, one.sha256), one.data)


async def test_a_tasks_images_are_read_once(folder: Path, blobs: Blobs, run_id: str) -> None:
    """Verified by their hash; kept within the memory, those used last."""
    put(blobs, run_id, CAT, DOG)
    images = RunImages(blobs, run_id)
    images.use_model(folder)
    task = task_with(folder, CAT, DOG)
    assert sorted((await images.of_task(task)).values()) == sorted([CAT, DOG])
    blobs.delete([blob_keys.image(run_id, admit(one).sha256) for one in (CAT, DOG)])
    assert sorted((await images.of_task(task)).values()) == sorted([CAT, DOG])
    assert images.num_bytes == len(CAT) + len(DOG)
    put(blobs, run_id, CAT, DOG)
    small = RunImages(blobs, run_id, max_bytes=len(CAT) + len(DOG) - 1)
    small.use_model(folder)
    assert sorted((await small.of_task(task)).values()) == sorted([CAT, DOG])
    assert small.num_bytes == len(DOG)
    assert await small.of_task(task_with(folder)) == {}


async def test_what_would_be_computed_otherwise_is_refused(
    folder: Path, blobs: Blobs, run_id: str, tmp_path: Path
) -> None:
    """Another processor, another size than the row says, a model of text, an object that is gone or damaged: each by name."""
    put(blobs, run_id, CAT)
    images = RunImages(blobs, run_id)
    images.use_model(folder)
    task = task_with(folder, CAT)
    assert task.images is not None
    other = write_vision_folder(tmp_path / "other", max_pixels=32 * 32)
    (ref,) = task.images.refs
    moved = ImageRef(position=1, num_tokens=1, grid_thw=(1, 2, 2), sha256=ref.sha256, size_bytes=ref.size_bytes)
    resized = RowImages(processor=task.images.processor, refs=(moved,))
    for wrong, message in (
        (task_with(other, CAT), "image processor"),
        (task_with(folder, CAT, images=resized), r"1 tokens; this worker finds \d+ bytes, \(1, 6, 6\) and 9"),
        (task_with(folder, DOG), "image_missing|no such object|does not exist|missing"),
    ):
        with pytest.raises(TaskRefused, match=message) as refused:
            await images.of_task(wrong)
        assert refused.value.reason in ("images_refused", "image_missing")
    text = RunImages(blobs, run_id)
    text.use_model(write_model(tmp_path / "text", SMOLLM2))
    with pytest.raises(TaskRefused, match="reads text alone"):
        await text.of_task(task)
    blobs.put(blob_keys.image(run_id, admit(DOG).sha256), CAT)
    with pytest.raises(TaskRefused, match=r"image|sha256|bytes"):
        await images.of_task(task_with(folder, DOG))


class Sampler:
    def __init__(self) -> None:
        self.prompts: list[Any] = []

    async def generate(self, prompts: Any, sampling: Sampling, n: int) -> list[list[Completion]]:
        self.prompts += prompts
        run = (VersionRun(PolicyVersion(0), 0, 1),)
        return [[Completion([7], [-1.0], run, "length", "") for _ in range(n)] for _ in prompts]


async def test_a_single_turn_shows_the_images_of_its_task(folder: Path, blobs: Blobs, run_id: str) -> None:
    """They are in its trajectories; a task whose image is lost is refused alone; without a store all of them are."""
    put(blobs, run_id, CAT)
    environment, sampler = SingleTurn(), Sampler()
    good, lost, plain = task_with(folder, CAT), task_with(folder, DOG), task_with(folder)
    (refused,) = await environment.rollout([good], sampler)
    assert isinstance(refused, TaskRefused)
    assert sampler.prompts == []
    images = RunImages(blobs, run_id)
    images.use_model(folder)
    environment.use_images(images)
    shown, missing, text = await environment.rollout([good, lost, plain], sampler)
    assert isinstance(missing, TaskRefused)
    assert not isinstance(shown, TaskRefused)
    assert not isinstance(text, TaskRefused)
    assert [one.images for one in (*shown, *text)] == [good.images, good.images, None, None]
    prompt, other = sampler.prompts
    assert isinstance(prompt, ImagePrompt)
    assert (list(prompt), prompt.images, list(prompt.data.values())) == (list(good.prompt_ids), good.images, [CAT])
    assert other == plain.prompt_ids
    assert (len(prompt), prompt[:2]) == (len(good.prompt_ids), good.prompt_ids[:2])
    for client, name in (
        (VllmClient("http://127.0.0.1:9"), "vLLM"),
        (SglangClient("http://127.0.0.1:9"), "an engine whose model reads text alone"),
    ):
        with pytest.raises(TaskRefused, match=f"a prompt has images, and {name} gets token ids alone"):
            await client.generate([other, prompt], good.sampling, 1)
        await client.close()
