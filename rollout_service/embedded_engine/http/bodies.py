"""Request bodies of SGLang 0.5.23, checked by pydantic.

Fields of SGLang that this engine does not compute accept only the value that requests nothing; any other value, and
any unknown field, is refused. No field is accepted and ignored.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

TokenIds = list[int]
MAX_TOP_LOGPROBS = 256  # a reply holds two numbers for each, as text


class Body(BaseModel):
    """Base of all bodies: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SamplingParams(Body):
    """SGLang's ``sampling_params``; the defaults are SGLang's."""

    n: Annotated[int, Field(ge=1, description="completions per prompt")] = 1
    max_new_tokens: Annotated[int, Field(ge=0)] | None = 128  # None: until the context is full
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    spaces_between_special_tokens: Literal[True] = True
    frequency_penalty: Literal[0] = 0
    presence_penalty: Literal[0] = 0
    repetition_penalty: Literal[1] = 1
    logit_bias: None = None
    stop_regex: None = None
    json_schema: None = None
    regex: None = None
    ebnf: None = None
    structural_tag: None = None
    beam_width: None = None
    custom_params: None = None
    stream_interval: None = None
    watermark: None = None


def _tag(value: object) -> str:
    return "list" if isinstance(value, list) else "object"


# Tagged by its JSON type, so that an error is reported for the form that was sent.
OneOrMany = Annotated[
    Annotated[SamplingParams, Tag("object")] | Annotated[list[SamplingParams], Tag("list")], Discriminator(_tag)
]


class GenerateBody(Body):
    rid: str | list[str] | None = None
    text: str | list[str] | None = None
    input_ids: TokenIds | list[TokenIds] | None = None
    sampling_params: OneOrMany = SamplingParams()
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Field(ge=-1)] | None = None
    stream: bool = False
    extra_key: str | None = None  # sequences share a prompt's computation only under the same key
    return_prompt_token_ids: bool = False
    return_text_in_logprobs: Literal[False] = False
    top_logprobs_num: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None  # of the prompt's positions
    token_ids_logprob: None = None
    return_hidden_states: Literal[False] = False
    return_routed_experts: bool = False
    routed_experts_start_len: Literal[0] = 0
    return_sampling_mask: Literal[False] | None = None
    lora_path: str | list[str | None] | None = None  # name of a loaded adapter, or one for each prompt
    session_params: None = None
    custom_logit_processor: None = None
    input_embeds: None = None
    image_data: str | list[str] | list[str | list[str] | None] | None = (
        None  # base64 or data URLs; see `http/images.py`
    )
    # Where the placeholders are; None: at every token with the image token's id. Not SGLang's: a policy may sample that id.
    image_positions: TokenIds | list[TokenIds] | None = None


class UpdateWeightsBody(Body):
    model_path: str
    weight_version: str | None = None
    load_format: Literal["auto", "safetensors"] | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    torch_empty_cache: Literal[False] = False
    recapture_cuda_graph: Literal[False] = False
    is_async: Literal[False] = False
    keep_pause: Literal[False] = False


class LoadAdapterBody(Body):
    lora_name: Annotated[str, Field(min_length=1)]
    lora_path: str
    pinned: Literal[False] = False


class UnloadAdapterBody(Body):
    lora_name: str


class CheckWeightsBody(Body):
    action: Literal["checksum"] = "checksum"


class PauseBody(Body):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueBody(Body):
    """Body of ``/continue_generation``; there is no device cache to empty, so only SGLang's default is accepted."""

    torch_empty_cache: Literal[True] = True


class AbortBody(Body):
    """Body of ``/abort_request``: a prefix of rids, or everything."""

    rid: str = ""
    abort_all: bool = False
