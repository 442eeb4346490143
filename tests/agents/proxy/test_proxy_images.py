"""Images in the messages of agents: stored once, placed in every row whose tokens stand for them, or refused."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.agents.proxy.agent_model import Bench, Engine, bench
from tests.agents.proxy.conversation import LOOK, Agent, check_rows, user
from tests.pictures import picture, picture_bytes
from tests.rollout_service.vision_folder import write_vision_folder

from penstock.agents.environments.over_http.wire import written
from penstock.agents.proxy.api import anthropic_messages, chat_completions, responses
from penstock.agents.proxy.messages import AgentRequest, Message, RequestRefused, RetryMark
from penstock.agents.proxy.rows import messages_json, stored_rows
from penstock.agents.proxy.session import AgentModel, AgentProxy, EpisodeLimits
from penstock.agents.proxy.tree import Found, PromptPlan
from penstock.protocol import blob_keys
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.groups import Sampling
from penstock.protocol.transport.blobs import Blobs
from penstock.rollout_service.engines.completion import Completion
from penstock.rollout_service.engines.engine_client import ImagePrompt
from penstock.rollout_service.run_images import RunImages

END = "<|im_end|>"
CALL = '<tool_call>\n{"name": "look", "arguments": {"word": "sun"}}\n</tool_call>' + END
CAT, DOG, OTHER_CAT = (picture_bytes(picture(*size, seed=n)) for n, size in enumerate(((24, 24), (32, 16), (24, 24))))


class SeeingEngine(Engine):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.given: list[Sequence[int]] = []

    async def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, n: int) -> list[list[Completion]]:
        self.given += prompts
        return await super().generate(prompts, sampling, n)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_folder(tmp_path_factory.mktemp("vision"))


def seeing(folder: Path, blobs: Blobs, run_id: str, *script: str | list[int]) -> Bench:
    """A proxy over a model that reads images."""
    images = RunImages(blobs, run_id)
    images.use_model(folder)
    tokenizer = ChatTokenizer.read(folder)
    model = AgentModel.of(tokenizer, "hermes", 8192)
    return Bench(
        AgentProxy(EpisodeLimits(), images),
        model,
        SeeingEngine(tokenizer, script=list(script)),
        Sampling(max_new_tokens=64),
    )


def data_url(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def shown(*parts: str | bytes) -> list[dict[str, Any]]:
    """Content of a message of the chat completions API."""
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in parts
    ]


def stored(blobs: Blobs, run_id: str) -> set[str]:
    return {stat.key.rpartition("/")[2] for stat in blobs.list(blob_keys.images_prefix(run_id))}


async def test_56_an_image_is_stored_once_and_in_every_row(folder: Path, blobs: Blobs, run_id: str) -> None:
    """A picture in the first message, another in a tool's result, three turns and a fork."""
    one = seeing(folder, blobs, run_id, CALL, "it shines" + END, "yes" + END, "no" + END)
    agent = Agent(one, {"role": "user", "content": shown("What is ", CAT, "?")}, tools=[LOOK])
    answer = await agent.ask()
    result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": shown("see ", DOG)}
    await agent.ask(result)
    await agent.ask(user("Sure?"))
    await agent.sample([*agent.messages[:-2], user("Really?")])  # goes on from the second turn again
    images = await one.proxy._images.processor()  # pyright: ignore[reportOptionalMemberAccess]
    turns = agent.episode.tree.turns
    for turn, prompt in zip(turns, one.engine.given, strict=True):  # pyright: ignore[reportAttributeAccessIssue]
        assert isinstance(prompt, ImagePrompt)
        assert list(prompt) == turn.path()[: turn.prompt_tokens].tolist()
        assert prompt.images == turn.images
        assert {ref.sha256: len(prompt.data[ref.sha256]) for ref in prompt.images.refs} == {
            ref.sha256: ref.size_bytes for ref in prompt.images.refs
        }
    assert [len(turn.images.refs) for turn in turns if turn.images] == [1, 2, 2, 2]
    made = agent.end()
    rows = stored_rows(made, turns)
    assert len(rows) == 2
    for row in rows:
        found = row.trajectory.images
        assert found is not None
        assert found.processor == images.sha256
        for ref, image in zip(found.refs, (CAT, DOG), strict=True):
            span = row.trajectory.token_ids[ref.position : ref.end]
            assert (span == images.image_token_id).all()
            assert not row.trajectory.loss_mask[ref.position : ref.end].any()
            assert images.process(image).num_tokens == ref.num_tokens
        assert np.count_nonzero(row.trajectory.token_ids == images.image_token_id) == found.num_tokens
    first = rows[0].trajectory.images
    assert first is not None
    assert stored(blobs, run_id) == {ref.sha256 for ref in first.refs}
    assert blobs.get_unverified(blob_keys.image(run_id, first.refs[0].sha256)) == CAT
    said = messages_json(agent.episode.messages)
    assert first.refs[0].sha256 in said
    assert "base64" not in said


async def test_the_same_words_with_another_picture_are_another_conversation(
    folder: Path, blobs: Blobs, run_id: str
) -> None:
    """Pictures of one size have the same ids: nothing of the first conversation goes on with the second picture."""
    one = seeing(folder, blobs, run_id, "a cat" + END, "another" + END)
    agent = Agent(one, {"role": "user", "content": shown(CAT)})
    await agent.ask()
    await agent.sample([{"role": "user", "content": shown(OTHER_CAT)}])
    first, second = agent.episode.tree.turns
    assert first.context_ids.tolist() == second.context_ids.tolist()
    assert second.parent is None
    assert agent.forks() == {"new_conversation": 1}
    edited = [{"role": "user", "content": shown(OTHER_CAT)}, agent.messages[1], user("go on")]
    await agent.sample(edited)
    assert agent.episode.tree.turns[2].parent is None, "the recorded answer was given to the other picture"
    agent.end()


def item(image: bytes) -> dict[str, Any]:
    return {"type": "input_image", "image_url": data_url(image), "detail": "auto"}


def block(image: bytes) -> dict[str, Any]:
    data = base64.b64encode(image).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


(ONE, TWO), (INPUT_ONE, INPUT_TWO) = (
    [{"type": kind, "text": text} for text in ("one ", "two")] for kind in ("text", "input_text")
)
CALLED = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
BODIES: dict[str, tuple[Any, str, list[dict[str, Any]]]] = {
    "chat": (chat_completions, "messages", [
        {"role": "user", "content": shown("one ", CAT, "two")},
        {"role": "assistant", "content": None, "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": "c", "content": shown(DOG)},
    ]),
    "responses": (responses, "input", [
        {"role": "user", "content": [INPUT_ONE, item(CAT), INPUT_TWO]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [item(DOG)]},
    ]),
    "anthropic": (anthropic_messages, "messages", [
        {"role": "user", "content": [ONE, block(CAT), TWO]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [block(DOG)]}]},
    ]),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_every_api_writes_images_in_its_own_way(name: str) -> None:
    api, field, items = BODIES[name]
    request: AgentRequest = api.read_request({field: items}, 1.0)
    first, _, result = request.messages
    assert (first.role, first.parts, first.content) == ("user", ("one ", CAT, "two"), "one \ntwo")
    assert (result.role, result.parts, result.tool_call_id) == ("tool", (DOG,), "c")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (shown("x", b"no picture"), "no image in PNG"),
        ([{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/cat.png"}}], "never fetched"),
        ([{"type": "image_url", "image_url": {"url": "/etc/hostname"}}], "expected a data URL"),
        ([{"type": "image", "source": {"type": "file", "file_id": "f1"}}], "expected bytes, base64"),
        ([{"type": "input_image", "file_id": "f1"}], "no image"),
        (shown(*[CAT] * 9), "a row may have 8"),
        (shown(picture_bytes(picture(1, 300))), "200 times"),
    ],
)
async def test_what_cannot_be_shown_is_refused_and_samples_nothing(
    folder: Path, blobs: Blobs, run_id: str, content: Any, message: str
) -> None:
    one = seeing(folder, blobs, run_id, "x" + END)
    with pytest.raises(RequestRefused, match=message) as refused:
        await Agent(one, {"role": "user", "content": content}).ask()
    assert refused.value.status == 400
    assert one.engine.prompts == []
    assert stored(blobs, run_id) == set()


async def test_images_of_other_roles_and_of_text_models_are_refused(
    folder: Path, blobs: Blobs, run_id: str, tmp_path: Path
) -> None:
    for role in ("system", "assistant"):
        body = {"messages": [{"role": role, "content": shown(CAT)}, user("x")]}
        with pytest.raises(RequestRefused, match="another role than user or tool"):
            chat_completions.read_request(body, 1.0)
    text = bench(tmp_path, "smollm2", script=["x" + END])
    with pytest.raises(RequestRefused, match="nowhere to store"):
        await Agent(text, {"role": "user", "content": shown(CAT)}).ask()
    images = RunImages(blobs, run_id)
    images.use_model(tmp_path / "smollm2")
    text.proxy = AgentProxy(EpisodeLimits(), images)
    with pytest.raises(RequestRefused, match="reads text alone"):
        await Agent(text, {"role": "user", "content": shown(CAT)}).ask()
    assert text.engine.prompts == []


async def test_the_text_of_a_placeholder_is_text(folder: Path, blobs: Blobs, run_id: str) -> None:
    """A user who writes it shows no picture; in an answer that was edited it would be one, and is refused."""
    one = seeing(folder, blobs, run_id, "x" + END, "y" + END)
    agent = Agent(one, {"role": "user", "content": shown("<|image_pad|>", CAT)})
    await agent.ask()
    assert len(agent.episode.tree.turns[0].images.refs) == 1  # pyright: ignore[reportOptionalMemberAccess]
    forged = [
        {"role": "user", "content": shown(CAT)},
        {"role": "assistant", "content": "<|vision_start|><|image_pad|><|vision_end|>"},
        user("go on"),
    ]
    with pytest.raises(RequestRefused, match="2 placeholders of images"):
        await agent.sample(forged)
    check_rows(agent.episode, one.proxy.end(agent.episode))


async def test_an_image_is_decoded_once_and_survives_a_full_memory(folder: Path, blobs: Blobs, run_id: str) -> None:
    """Agents send a picture again with every request; what the memory lost is read from S3."""
    one = seeing(folder, blobs, run_id, "a" + END, "b" + END, "c" + END)
    images: RunImages = one.proxy._images  # pyright: ignore[reportAssignmentType]
    first = await images.admit(CAT)
    assert await images.admit(CAT) is first
    agent = Agent(one, {"role": "user", "content": shown(CAT, DOG)})
    await agent.ask()
    images._kept.clear()
    await agent.ask(user("and?"))
    assert len(stored(blobs, run_id)) == 2
    images._kept.clear()
    blobs.delete([blob_keys.image(run_id, sha256) for sha256 in stored(blobs, run_id)])
    plan = PromptPlan(
        Found(None, 0, b"", (), False), None, 0, np.zeros(1, np.int32), False, "", agent.episode.tree.turns[0].images
    )
    with pytest.raises(RequestRefused, match="cannot be read again"):
        await agent.episode._prompt(plan)


async def test_a_play_shows_pictures_too(folder: Path, blobs: Blobs, run_id: str) -> None:
    """Environments in Python write them in their messages; over HTTP they are data URLs."""
    one = seeing(folder, blobs, run_id, "a cat" + END)
    message = Message.of_parts("user", "What is this?", CAT)
    episode = one.begin()
    turn = await episode.answer(AgentRequest((message,)), RetryMark(b""))
    assert turn.images is not None
    sent = written(episode.messages[0])
    assert chat_completions.read_message(sent, "m").parts == ("What is this?", CAT)
