"""The form of the tables, and answers that many keys share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KL = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "kl+": "k1+", "mse+": "k2+", "low_var_kl+": "k3+"}
REWARD_KL = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
SCHEDULE = {"constant_with_warmup": "constant"}
LINEAR = {"all-linear": []}

STEPS = "the schedule ends with the run: trainer.steps, or trainer.epochs"
MICRO = "micro-batches are cut by trainer.micro_batch_tokens"
MICRO_REWARD = "rewards are computed by services of their own, which batch by themselves: reward.name"
METRICS = "all metrics are in the run folder's metrics.jsonl and on the event stream"
ENGINE = "an option of the engine; pass it to the server the worker starts (sglang.extra_args, vllm.extra_args)"
OTHER_ENGINE = "an option of another engine or trainer; Penstock starts SGLang and DeepSpeed with its own settings"
COLOCATED = "workers and trainer never share a GPU: CUDA_VISIBLE_DEVICES of each service says which ones it has"
DEVICES = (
    "CUDA_VISIBLE_DEVICES of each service says which GPUs it has; trainer.num_ranks is the number of training processes"
)
CRITIC_RANKS = "the critic is computed by the trainer's ranks: trainer.num_ranks"
OFFLOAD = 'trainer.offload = "optimizer", or "parameters" with trainer.zero_stage = 3'
NO_PARALLEL = "not offered: trainer.zero_stage shards the model over trainer.num_ranks"
NO_FSDP = "the trainer is DeepSpeed's: trainer.zero_stage"
NO_PADDING = "padding is never computed where completions can share a prompt"
LOGITS = "logits are always computed in chunks and in float32; their size is set in trainer/learner/logprobs.py"
ADAMW = "the optimizer is AdamW with trainer.betas and trainer.weight_decay; its epsilon is 1e-8"
INEXACT = "not offered: it makes the recorded log-probabilities inexact"
RAY = "there is no Ray: services are started by themselves, and communicate through nats.url and s3.endpoint"
PROFILER = "not offered; every step's times are in metrics.jsonl, and `penstock watch` shows them"
REMOTE_CODE = "code in a model folder is never run: model.path must be a model that transformers knows"
TRACKER = 'tracker = ["wandb"] in the run file, or a table [[tracker]]; the library reads its credentials from the environment'
QUANTISED = (
    "no quantised base (QLoRA): engines would serve another base than the one that the trainer computes with; use model.lora.rank with "
    "model.dtype = bfloat16, trainer.zero_stage and trainer.offload (docs/memory.md)"
)
HUB = "nothing is uploaded; `penstock weights export` writes a model folder"
SHAPE = "the shape of the model is that of config.json at model.path"


@dataclass(frozen=True, slots=True)
class Alias:
    """The Penstock keys that one foreign key sets, and the foreign values with another name here."""

    keys: tuple[str, ...]
    values: Mapping[Any, Any] = field(default_factory=dict)
    as_list: bool = False  # a single text is a list of one
    left_out: tuple[str, ...] = ()  # entries of a list that are always on here

    def value(self, theirs: Any) -> Any:
        """Return a foreign value as Penstock spells it."""
        if self.left_out:
            listed = [theirs] if isinstance(theirs, str) and theirs not in ("None", "none", "null") else theirs
            return [one for one in listed if one not in self.left_out] if isinstance(listed, list) else listed
        if self.as_list and isinstance(theirs, str) and theirs not in ("None", "none", "null"):
            return [theirs]
        return self.values.get(theirs, theirs) if isinstance(theirs, (str, int)) else theirs


ESTIMATOR = Alias(
    ("algorithm.name",),
    {
        "gae": "ppo", "group_norm": "grpo", "reinforce_baseline": "reinforce_pp_baseline",
        "reinforce_plus_plus": "reinforce_pp", "reinforce_plus_plus_baseline": "reinforce_pp_baseline", "grpo_passk": "pass_at_k",
    },
)  # fmt: skip
TRACKERS = Alias(("tracker",), as_list=True, left_out=("console", "file", "stdout"))  # panel and metrics.jsonl


def taken(*keys: str, values: Mapping[Any, Any] | None = None, as_list: bool = False) -> Alias:
    """Return the alias for some keys."""
    return Alias(keys, values or {}, as_list)
