"""The bodies of the protocol between a worker and an environment server. Pure.

| call                          | body      | answer     | sent again                                 |
|-------------------------------|-----------|------------|--------------------------------------------|
| ``GET /environment``          |           | `About`    |                                            |
| ``POST /episodes``            | `Start`   | `Started`  | the same id: the same answer               |
| ``POST /episodes/ID/step``    | `Step`    | `Stepped`  | the same step: the same answer; nothing moves twice |
| ``POST /episodes/ID/score``   | `Score`   | `Scored`   | the same answer                            |
| ``DELETE /episodes/ID``       |           | 204        | 204                                        |

A score is asked of servers whose `Started` says ``scores``, where a limit of the run ended the episode. Any other answer is a `Problem`. Messages and tools are those of the chat completions API.
"""

from __future__ import annotations

import base64
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from penstock.agents.environments.play import Reply, Row
from penstock.agents.proxy.api.chat_completions import read_request
from penstock.agents.proxy.messages import AgentRequest, Message
from penstock.protocol.images.admission import AdmittedImage

_MOST = 1e9  # a sum over the turns of an episode stays finite

EpisodeId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Object = dict[str, JsonValue]
Number = Annotated[float, Field(ge=-_MOST, le=_MOST, allow_inf_nan=False)]
PartName = Annotated[str, Field(min_length=1, max_length=64)]
ProblemCode = Literal[
    "bad_request", "unauthorized", "unknown_episode", "step_refused", "row_refused", "wrong_version", "full", "draining",
    "environment_failed",
]  # fmt: skip


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class About(_Body):
    protocol: Literal[1] = Field(1, description="Version of this protocol.")
    name: str = Field(max_length=100, description="Name of the environment.")
    version: str = Field("", max_length=100, description="Version of its rules.")
    capacity: int = Field(ge=1, description="Episodes that it plays at once.")
    running: int = Field(ge=0, description="Episodes that it plays now.")
    draining: bool = Field(False, description="True while it takes no new episodes.")
    options: Object = Field(default_factory=dict, description="JSON Schema of `Start.options`.")


class WireRow(_Body):
    """The row of the data that an episode is made of."""

    messages: list[Object] = Field(default_factory=list, max_length=1024, description="The prompt.")
    ground_truth: JsonValue = None
    extra_info: Object = Field(default_factory=dict)
    data_source: str = ""

    @classmethod
    def of(cls, row: Row) -> WireRow:
        return cls(
            messages=[written(message) for message in row.messages], ground_truth=row.ground_truth,
            extra_info=dict(row.extra_info), data_source=row.data_source,
        )  # fmt: skip


class Start(_Body):
    protocol: Literal[1] = 1
    id: EpisodeId = Field(description="Chosen by the worker, at random; another one for each attempt.")
    episode: str = Field("", max_length=400, description="The same for each attempt at an episode.")
    attempt: int = Field(0, ge=0, description="0 for the first attempt.")
    seed: str = Field(
        pattern=r"^[0-9]{1,19}$",
        description="A whole number below 2**63, equal in a group; as text, because JSON numbers of that size lose digits.",
    )
    version: str = Field("", max_length=100, description="Version of the rules that the run expects; empty: any.")
    deadline_s: float = Field(
        gt=0, description="Seconds after which the worker has ended the episode; then it may be dropped."
    )
    row: WireRow
    options: Object = Field(default_factory=dict, description="`options.options` of the run file.")


class Started(_Body):
    messages: list[Object] = Field(min_length=1, max_length=256, description="The last one is of the role user.")
    tools: list[Object] = Field(default_factory=list, max_length=128, description="What the policy may call.")
    version: str = Field("", max_length=100, description="Version of the rules; stored with the episode.")
    scores: bool = Field(
        False, description="True: `/score` is called where a limit of the run ended the episode before a last reply."
    )


class Step(_Body):
    step: int = Field(ge=1, description="1 for the first answer, then one more each time.")
    message: Object = Field(description="Of the role assistant; `tool_calls` as they were found in its text.")


class Stepped(_Body):
    messages: list[Object] = Field(
        default_factory=list, max_length=256, description="Of the roles user and tool; needed unless `done`."
    )
    reward: Number = Field(0.0, description="For this answer alone.")
    parts: dict[PartName, Number] = Field(default_factory=dict, max_length=32, description="Summed over the episode.")
    done: bool = False
    state: str = Field("", max_length=256, description="Equal where the policy chooses in the same situation.")
    truncated: bool = Field(False, description="With `done`: a limit of the environment ended it, not its rules.")


class Score(_Body):
    """A limit of the run ended the episode: no step follows."""

    step: int = Field(ge=1, description="The last step that was answered.")


class Scored(_Body):
    """What the last step gets besides its reward."""

    reward: Number


class Problem(_Body):
    """Why a call was refused."""

    code: ProblemCode
    message: str = Field(max_length=2000)


def written(message: Message) -> Object:
    return message.as_dict(_data_url)


def _data_url(image: bytes | AdmittedImage) -> Object:
    data = base64.b64encode(image if isinstance(image, bytes) else image.data).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/any;base64,{data}"}}


def read(messages: list[Object], tools: list[Object] | None = None) -> AgentRequest:
    return read_request({"messages": messages, "tools": tools or []}, temperature=1.0)


def read_reply(stepped: Stepped) -> Reply:
    messages = read(stepped.messages).messages if stepped.messages else ()
    return Reply(messages, stepped.reward, stepped.done, stepped.parts, stepped.state, stepped.truncated)


def write_reply(reply: Reply) -> Stepped:
    return Stepped(
        messages=[written(message) for message in reply.messages],
        reward=float(reply.reward),
        parts={name: float(value) for name, value in reply.parts.items()},
        done=reply.is_done,
        state=reply.state,
        **({"truncated": True} if reply.is_truncated else {}),  # absent: older workers refuse fields they do not know
    )
