"""The command that serves a reward model; imports neither torch nor the server before it is run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from penstock.protocol.command_line import FLAT, Help, Least
from penstock.protocol.model_folder import refuse_adapter
from penstock.reward_service.hosting.commands import ServeOptions


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How a reward model reads texts, and what a call may take."""

    dtype: Annotated[Literal["float32", "bfloat16"], Help("Number format.")] = "float32"
    device: Annotated[str, Help("Torch device.")] = "cpu"
    form: Annotated[
        Literal["auto", "chat", "plain"], Help("Input format; auto: chat if the tokenizer has a chat template.")
    ] = "auto"
    prompt_column: Annotated[str, Help("The row's column with the question, as text or messages.")] = ""
    label: Annotated[int | None, Help("With several labels: index of the label whose probability is the score.")] = None
    max_length: Annotated[
        int | None, Least(1), Help("Token limit of a text; longer texts are errors; default the model's.")
    ] = None
    batch_tokens: Annotated[int, Least(1), Help("Tokens per forward pass, padding included.")] = 16_384
    timeout_s: Annotated[float, Help("Deadline of one call in seconds.")] = 300.0


def serve_model(
    path: Annotated[Path, Help("The model's folder.")],
    *,
    model: Annotated[ModelOptions, FLAT] = ModelOptions(),
    options: Annotated[ServeOptions, FLAT] = ServeOptions(),
) -> int:
    """Serve a reward model from its folder as a reward endpoint.

    PATH is a model folder as transformers writes it, with a sequence-classification head: one label (a reward model; its
    logit is the score) or several (--label N: the probability of label N).

    The prompt that the policy saw is rendered with the policy's chat template. For a reward model with a separate template, name
    the row's column with the question (--prompt-column), so that it is rendered only once.

    Example:  penstock reward serve-model rm/ --prompt-column question --register http://127.0.0.1:8700
    Then:     penstock reward test rm
    """
    from penstock.protocol.errors import ConfigError

    refuse_adapter(path, "PATH")
    if not (path / "config.json").is_file():  # checked before torch is imported
        raise ConfigError(f"{path}: not a model folder (config.json is missing)")
    try:
        from penstock.reward_model.served_model import ModelReward
    except ModuleNotFoundError as err:
        raise ConfigError(f"{err.name} is not installed; pip install 'penstock[reward-model]'") from None
    from penstock.reward_service.hosting.served_reward import place_of, serve_reward

    name = path.resolve().name
    place_of(options, name)  # refuses options before the model is loaded
    return serve_reward(ModelReward(path, model), name, options)
