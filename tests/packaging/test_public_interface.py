"""The public interface: nothing is removed from it or changed without this list.

A change that is meant changes the list, and has an entry in CHANGELOG.md. The failing test prints the new lines.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
from typing import Any

import penstock
from tests.packaging.conftest import ROOT

# Public name -> kind and signature, then its public members likewise.
INTERFACE: dict[str, list[str]] = {
    "AsyncClient": [
        "class() (where: 'str' = 'local', *, token: 'str | None' = None, runs: 'str | os.PathLike[str]' = 'runs') -> 'None'",
        "close(self) -> 'None'",
        "dpo(self, *, model: 'Model', data: 'Data | Settings', run_id: 'str | None' = None, **settings: 'Any') -> 'AsyncFineTuning'",
        "evaluate(self, target: 'Any', data: 'Data', **options: 'Any') -> 'EvaluationResult'",
        "run(self, run_id: 'str') -> 'AsyncRun'",
        "sft(self, *, model: 'Model', data: 'Data | Settings', run_id: 'str | None' = None, **settings: 'Any') -> 'AsyncFineTuning'",
        "train(self, *, model: 'Model', data: 'Data | Settings', reward: 'Rewards', algorithm: 'str | Settings' = 'async_grpo', run_id: 'str | None' = None, workers: 'int' = 2, **settings: 'Any') -> 'AsyncRun'",
    ],
    "AsyncFineTuning": [
        "class() (training: 'FineTuning') -> 'None'",
        "close(self) -> 'None'",
        "folder",
        "id",
        "metrics(self, kind: \"Literal['step', 'eval']\" = 'step') -> 'Metrics'",
        "model(self) -> 'Path'",
        "state(self) -> 'State'",
        "stop(self) -> 'None'",
        "wait(self, timeout: 'float | None' = None) -> 'Self'",
    ],
    "AsyncRun": [
        "class() (run: 'Run') -> 'None'",
        "chat(self, prompt: 'str | Sequence[dict[str, str]]', *, temperature: 'float' = 0.0, max_tokens: 'int | None' = None) -> 'str'",
        "checkpoint(self) -> 'Path | None'",
        "close(self) -> 'None'",
        "events(self) -> 'AsyncIterator[Event]'",
        "export(self, to: 'str | Path', version: 'int | None' = None) -> 'Path'",
        "folder",
        "id",
        "metrics(self, kind: \"Literal['step', 'eval']\" = 'step') -> 'Metrics'",
        "model(self) -> 'Path'",
        "pause(self) -> 'None'",
        "report(self) -> 'Path'",
        "resume(self) -> 'None'",
        "state(self) -> 'State'",
        "step(self) -> 'int'",
        "stop(self) -> 'None'",
        "summary(self) -> 'dict[str, Any]'",
        "wait(self, timeout: 'float | None' = None) -> 'Self'",
        "weights(self) -> 'list[dict[str, Any]]'",
    ],
    "Candidate": [
        "dataclass() (advantage: 'float', truncated: 'bool' = False, reward: 'float' = 0.0, num_tokens: 'int' = 0, source: 'str' = '', num_turns: 'int' = 1) -> None",
        "advantage",
        "num_tokens",
        "num_turns",
        "reward",
        "source",
        "truncated",
    ],
    "Client": [
        "class() (where: 'str' = 'local', *, token: 'str | None' = None, runs: 'str | os.PathLike[str]' = 'runs') -> 'None'",
        "close(self) -> 'None'",
        "dpo(self, *, model: 'Model', data: 'Data | Settings', run_id: 'str | None' = None, **settings: 'Any') -> 'FineTuning'",
        "evaluate(self, target: 'Run | FineTuning | str | os.PathLike[str]', data: 'Data', *, version: 'int | str | None' = None, samples: 'int' = 1, reward: 'str | os.PathLike[str] | None' = None, temperature: 'float | None' = None, max_tokens: 'int | None' = None, workers: 'int' = 1, **settings: 'Any') -> 'EvaluationResult'",
        "run(self, run_id: 'str') -> 'Run'",
        "sft(self, *, model: 'Model', data: 'Data | Settings', run_id: 'str | None' = None, **settings: 'Any') -> 'FineTuning'",
        "train(self, *, model: 'Model', data: 'Data | Settings', reward: 'Rewards', algorithm: 'str | Settings' = 'async_grpo', run_id: 'str | None' = None, workers: 'int' = 2, **settings: 'Any') -> 'Run'",
    ],
    "ClipRange": [
        "class(Options) (*, clip_low: typing.Annotated[float, Gt(gt=0), Le(le=1)] = 0.2, clip_high: typing.Annotated[float, Gt(gt=0)] = 0.2) -> None",
        "model_config",
    ],
    "Completion": [
        "dataclass() (token_ids: 'list[int]', logprobs: 'list[float]', version_runs: 'tuple[VersionRun, ...]', finish_reason: 'FinishReason', text: 'str', experts: 'ExpertChoices | None' = None) -> None",
        "experts",
        "finish_reason",
        "logprobs",
        "text",
        "token_ids",
        "version_runs",
    ],
    "ConfigError": [
        "class(PenstockError)",
    ],
    "Correction": [
        "dataclass(Part) (*, name: 'str', fn: 'Callable[..., Any]', options: 'type[OptionsT_co]', source: 'str', presets: 'Mapping[str, Mapping[str, Any]]' = <factory>, switch: 'str' = '', repeats_ratio: 'bool' = False) -> None",
        "bind(self, **values: 'Any') -> 'Callable[..., Any]'",
        "option_names",
        "repeats_ratio",
        "summary",
        "switch",
    ],
    "Drift": [
        "dataclass() (mismatch: 'Tensor', to_behaviour: 'Tensor', advantages: 'Tensor', ages: 'Tensor', sequences: 'Sequences', drift_limit: 'float | None' = None) -> None",
        "advantages",
        "ages",
        "drift_limit",
        "mismatch",
        "sequences",
        "to_behaviour",
    ],
    "DualClip": [
        "class(Options) (*, dual_clip: typing.Annotated[float | None, Gt(gt=1)] = None) -> None",
        "model_config",
    ],
    "EngineChecksum": [
        "dataclass() (value: 'str', layout: 'str', is_of_files: 'bool' = False) -> None",
        "is_of_files",
        "layout",
        "value",
    ],
    "EngineClient": [
        "class(Generates, Protocol) (*args, **kwargs)",
        "close(self) -> 'None'",
        "drop_adapters(self) -> 'None'",
        "forget_lost_adapters(self) -> 'None'",
        "generate(self, prompts: 'Sequence[Sequence[int]]', sampling: 'Sampling', n: 'int', adapter: 'PolicyVersion | None' = None, seeds: 'Sequence[int] | None' = None) -> 'list[list[Completion]]'",
        "health(self) -> 'None'",
        "inspect(self) -> 'ServerReport'",
        "load_adapter(self, folder: 'Path', version: 'PolicyVersion') -> 'None'",
        "load_weights(self, folder: 'Path', version: 'PolicyVersion', mode: 'UpdateMode' = 'drain') -> 'None'",
        "mark_unverified(self, reason: 'str') -> 'None'",
        "mark_verified(self) -> 'None'",
        "metrics(self) -> 'dict[str, float]'",
        "served_version(self) -> 'PolicyVersion | None'",
        "started_with(self, folder: 'Path', version: 'PolicyVersion') -> 'None'",
        "unload_adapter(self, version: 'PolicyVersion') -> 'None'",
        "weights_checksum(self) -> 'EngineChecksum | None'",
    ],
    "EngineKind": [
        "dataclass() (name: 'str', connect: 'Connect', launches: 'Callable[[Any, Mapping[str, str]], Sequence[ServerLaunch]] | None' = None, options: 'type[Section]' = <class 'penstock.rollout_service.engines.engine_kind.NoOptions'>, section: 'str' = '', update_modes: 'tuple[UpdateMode, ...]' = ('drain', 'retract', 'in_place', 'abort'), returns_experts: 'bool' = False) -> None",
        "connect",
        "is_attached",
        "launches",
        "may_abandon",
        "name",
        "options",
        "returns_experts",
        "section",
        "update_modes",
    ],
    "Environment": [
        "class(ABC) ()",
        "close(self) -> 'None'",
        "defined(self, name: 'str', definition: 'EnvironmentDefinition') -> 'Environment'",
        "kept_staleness",
        "never_call(self, servers: 'Sequence[OwnServer]') -> 'None'",
        "new_registry(self, store: 'KeyValue') -> 'ServerRegistry'",
        "registered",
        "rollout(self, tasks: 'Sequence[Task]', sampler: 'Sampler') -> 'Sequence[Sequence[Trajectory] | TaskRefused] | Sequence[Sequence[Episode] | TaskRefused]'",
        "use_images(self, images: 'RunImages') -> 'None'",
        "use_model(self, folder: 'Path', context_tokens: 'int | None') -> 'None'",
        "use_registry(self, registry: 'ServerRegistry') -> 'None'",
        "use_worker(self, store: 'EpisodeStore', running: 'asyncio.Semaphore | None') -> 'None'",
    ],
    "Estimator": [
        "dataclass(Part) (*, name: 'str', fn: 'Callable[..., Any]', options: 'type[OptionsT_co]', source: 'str', presets: 'Mapping[str, Mapping[str, Any]]' = <factory>, needs_baseline: 'bool' = False, group_relative: 'bool' = False, has_critic: 'bool' = False, by_turn: 'bool' = False) -> None",
        "bind(self, **values: 'Any') -> 'Callable[..., Any]'",
        "by_turn",
        "group_relative",
        "has_critic",
        "needs_baseline",
        "option_names",
        "summary",
    ],
    "Event": [
        "dataclass() (kind: 'str', source: 'str', at: 'float', data: 'dict[str, Any]') -> None",
        "at",
        "data",
        "kind",
        "source",
    ],
    "Extension": [
        "dataclass(Generic) (name: 'str', value: 'Kind', digest: 'str' = '') -> None",
        "digest",
        "name",
        "value",
    ],
    "Filter": [
        "dataclass(Part) (*, name: 'str', fn: 'Callable[..., Any]', options: 'type[OptionsT_co]', source: 'str', presets: 'Mapping[str, Mapping[str, Any]]' = <factory>, reason: 'str', switch: 'str' = '', reads_advantage: 'bool' = True, precedence: 'int' = 100) -> None",
        "bind(self, **values: 'Any') -> 'Callable[..., Any]'",
        "option_names",
        "precedence",
        "reads_advantage",
        "summary",
        "switch",
    ],
    "FineTuning": [
        "class() (verb: 'str', backend: 'TrainingBackend') -> 'None'",
        "close(self) -> 'None'",
        "folder",
        "id",
        "metrics(self, kind: \"Literal['step', 'eval']\" = 'step') -> 'Metrics'",
        "model",
        "state",
        "stop(self) -> 'None'",
        "wait(self, timeout: 'float | None' = None) -> 'Self'",
    ],
    "GroupCandidate": [
        "dataclass() (rewards: 'tuple[float, ...]', lengths: 'tuple[int, ...]', finish_reasons: 'tuple[str, ...]', has_baseline: 'bool', oldest_version: 'int', newest_version: 'int', prompt_text: 'str', row: 'RewardRequest | None') -> None",
        "finish_reasons",
        "has_baseline",
        "lengths",
        "newest_version",
        "oldest_version",
        "prompt_text",
        "rewards",
        "row",
    ],
    "GroupFilter": [
        "dataclass(Part) (*, name: 'str', fn: 'Callable[..., Any]', options: 'type[OptionsT_co]', source: 'str', presets: 'Mapping[str, Mapping[str, Any]]' = <factory>, reason: 'str', switch: 'str' = '', precedence: 'int' = 100) -> None",
        "bind(self, **values: 'Any') -> 'Callable[..., Any]'",
        "option_names",
        "precedence",
        "summary",
        "switch",
    ],
    "Loss": [
        "dataclass(Part) (*, name: 'str', fn: 'Callable[..., Any]', options: 'type[OptionsT_co]', source: 'str', presets: 'Mapping[str, Mapping[str, Any]]' = <factory>, uses_ratio: 'bool' = True) -> None",
        "bind(self, **values: 'Any') -> 'Callable[..., Any]'",
        "option_names",
        "summary",
        "uses_ratio",
    ],
    "LossTerms": [
        "dataclass() (loss: 'Tensor', ratio: 'Tensor', clipped: 'Tensor', dual_clipped: 'Tensor') -> None",
        "clipped",
        "dual_clipped",
        "loss",
        "ratio",
    ],
    "Message": [
        "dataclass() (role: 'str', content: 'str' = '', reasoning: 'str' = '', tool_calls: 'tuple[ToolCall, ...]' = (), tool_call_id: 'str' = '', name: 'str' = '', unparsed_calls: 'int' = 0, parts: 'tuple[Part, ...]' = ()) -> None",
        "content",
        "for_template(self, *, with_reasoning: 'bool' = True) -> 'dict[str, Any]'",
        "images",
        "name",
        "of_parts(role: 'str', *parts: 'Part', tool_call_id: 'str' = '') -> 'Message'",
        "parts",
        "reasoning",
        "role",
        "tool_call_id",
        "tool_calls",
        "unparsed_calls",
    ],
    "Metrics": [
        "class(dict) (columns: 'Mapping[str, Array]') -> 'None'",
        "to_pandas(self) -> 'Any'",
    ],
    "MetricsLog": [
        "class() (run: 'str', *arguments: 'str') -> 'None'",
        "close(self) -> 'None'",
        "finish(self) -> 'None'",
        "log(self, step: 'int', values: 'Mapping[str, float]') -> 'None'",
    ],
    "Options": [
        "class(Section) () -> None",
        "model_config",
    ],
    "Outcomes": [
        "dataclass() (rewards: 'Tensor', groups: 'Tensor', lengths: 'Tensor', baselines: 'Tensor | None' = None, turns: 'Turns | None' = None, sources: 'Tensor | None' = None) -> None",
        "baselines",
        "each_turn",
        "group_index",
        "groups",
        "lengths",
        "rewards",
        "sets(self, name: 'str') -> 'Tensor'",
        "sources",
        "turns",
    ],
    "PenstockError": [
        "class(Exception)",
    ],
    "Play": [
        "class(ABC) ()",
        "close(self) -> 'Awaitable[None] | None'",
        "score(self) -> 'float | Awaitable[float]'",
        "start(self) -> 'Sequence[Message] | Awaitable[Sequence[Message]]'",
        "step(self, answer: 'Message') -> 'Reply | Awaitable[Reply]'",
        "tools",
        "version",
    ],
    "PlayOptions": [
        "class(Section) () -> None",
        "model_config",
    ],
    "Registry": [
        "class(Generic) (kind: 'str', expected: 'type[Kind]', *, package: 'str', group: 'str', second_package: 'str' = '') -> 'None'",
        "built_in",
        "find(self, name: 'str') -> 'Extension[Kind]'",
        "names(self) -> 'tuple[str, ...]'",
    ],
    "Reply": [
        "dataclass() (messages: 'tuple[Message, ...]' = (), reward: 'float' = 0.0, is_done: 'bool' = False, parts: 'Mapping[str, float]' = <factory>, state: 'str' = '', is_truncated: 'bool' = False) -> None",
        "is_done",
        "is_truncated",
        "messages",
        "parts",
        "reward",
        "state",
    ],
    "Row": [
        "dataclass() (messages: 'tuple[Message, ...]', ground_truth: 'Any', extra_info: 'Mapping[str, Any]', data_source: 'str') -> None",
        "data_source",
        "extra_info",
        "ground_truth",
        "messages",
        "of(task: 'Task') -> 'Row'",
    ],
    "Run": [
        "class() (backend: 'RunBackend') -> 'None'",
        "chat(self, prompt: 'str | Sequence[dict[str, str]]', *, temperature: 'float' = 0.0, max_tokens: 'int | None' = None) -> 'str'",
        "checkpoint(self) -> 'Path | None'",
        "close(self) -> 'None'",
        "events(self) -> 'Iterator[Event]'",
        "export(self, to: 'str | Path', version: 'int | None' = None) -> 'Path'",
        "folder",
        "id",
        "metrics(self, kind: \"Literal['step', 'eval']\" = 'step') -> 'Metrics'",
        "model",
        "pause(self) -> 'None'",
        "report",
        "resume(self) -> 'None'",
        "state",
        "step",
        "stop(self) -> 'None'",
        "summary(self) -> 'dict[str, Any]'",
        "wait(self, timeout: 'float | None' = None) -> 'Self'",
        "weights(self) -> 'list[dict[str, Any]]'",
    ],
    "RunFailed": [
        "class(PenstockError)",
    ],
    "Sampler": [
        "class(Protocol) (*args, **kwargs)",
        "generate(self, prompts: 'Sequence[Sequence[int]]', sampling: 'Sampling', n: 'int', *, seeds: 'Sequence[int] | None' = None) -> 'list[list[Completion]]'",
    ],
    "Sampling": [
        "class(Wire) (*, max_new_tokens: typing.Annotated[int, Ge(ge=1), Le(le=1000000)], temperature: typing.Annotated[float, Ge(ge=0), Le(le=100), AllowInfNan(allow_inf_nan=False)] = 1.0, top_p: typing.Annotated[float, Gt(gt=0), Le(le=1)] = 1.0, top_k: typing.Annotated[int, Ge(ge=-1)] = -1, stop_token_ids: tuple[int, ...] = (), stop: typing.Annotated[tuple[typing.Annotated[str, FieldInfo(annotation=NoneType, required=True, metadata=[MinLen(min_length=1), MaxLen(max_length=200)])], ...], MaxLen(max_length=16)] = (), routers: penstock.protocol.facts.RouterShape | None = None) -> None",
        "model_config",
    ],
    "Sequences": [
        "dataclass() (index: 'Tensor', count: 'int') -> None",
        "count",
        "from_rows(self, rows: 'Tensor') -> 'Tensor'",
        "index",
        "lengths(self, like: 'Tensor') -> 'Tensor'",
        "maximum(self, values: 'Tensor') -> 'Tensor'",
        "mean(self, values: 'Tensor') -> 'Tensor'",
        "of_lengths(lengths: 'Tensor') -> 'Sequences'",
        "place(self) -> 'Tensor'",
        "spread(self, values: 'Tensor') -> 'Tensor'",
        "sum(self, values: 'Tensor') -> 'Tensor'",
        "to_rows(self, values: 'Tensor') -> 'tuple[Tensor, Tensor]'",
    ],
    "ServerLaunch": [
        "dataclass() (command: 'LaunchCommand', log_name: 'str', environ: 'Mapping[str, str] | None' = None, context_length: 'int | None' = None, prepare: 'Sequence[str]' = ()) -> None",
        "command",
        "context_length",
        "environ",
        "log_name",
        "prepare",
    ],
    "ServerReport": [
        "dataclass() (objections: 'list[str]' = <factory>, untested_version: 'str' = '', context_tokens: 'int | None' = None, takes_adapters: 'bool' = False) -> None",
        "context_tokens",
        "objections",
        "takes_adapters",
        "untested_version",
    ],
    "StdNormalisation": [
        "class(Options) (*, normalise_by_std: bool = True) -> None",
        "model_config",
    ],
    "Task": [
        "class(Wire) (*, group_id: typing.Annotated[str, MinLen(min_length=1), MaxLen(max_length=200), _PydanticGeneralMetadata(pattern='^[A-Za-z0-9_.:#-]+$')], prompt_ids: typing.Annotated[tuple[typing.Annotated[int, FieldInfo(annotation=NoneType, required=True, metadata=[Ge(ge=0), Lt(lt=2147483648)])], ...], MinLen(min_length=1)], prompt_text: str, group_size: typing.Annotated[int, Ge(ge=1), Le(le=4096)], sampling: penstock.protocol.facts.Sampling, reward: penstock.protocol.facts.RewardRequest, split: Literal['train', 'eval'], environment: typing.Annotated[str, MinLen(min_length=1), MaxLen(max_length=200), _PydanticGeneralMetadata(pattern='^[A-Za-z0-9_.:#-]+$')] = 'single_turn', attempt: typing.Annotated[int, Ge(ge=0), Le(le=9007199254740992)] = 0, issued_version: typing.Annotated[int, Ge(ge=0), Le(le=9007199254740992)], pinned_version: Optional[Annotated[int, FieldInfo(annotation=NoneType, required=True, metadata=[Ge(ge=0), Le(le=9007199254740992)])]] = None, with_baseline: bool = False, redundant_completions: typing.Annotated[int, Ge(ge=0), Lt(lt=4096)] = 0, redundant_wait: typing.Annotated[float, Ge(ge=0), Le(le=1000), AllowInfNan(allow_inf_nan=False)] = 0.0, min_episodes: Optional[Annotated[int, FieldInfo(annotation=NoneType, required=True, metadata=[Ge(ge=0), Le(le=9007199254740992)])]] = None, messages: str = '', teacher_top_k: Optional[Annotated[int, FieldInfo(annotation=NoneType, required=True, metadata=[Ge(ge=0), Le(le=256)])]] = None, seed: Optional[Annotated[int, FieldInfo(annotation=NoneType, required=True, metadata=[Ge(ge=0), Le(le=9223372036854775807)])]] = None, images: penstock.protocol.facts.RowImages | None = None) -> None",
        "model_config",
    ],
    "Tokens": [
        "dataclass() (current: 'Tensor', anchor: 'Tensor', behaviour: 'Tensor', advantages: 'Tensor', sequences: 'Sequences', turns_of_episodes: 'Sequences | None' = None) -> None",
        "advantages",
        "anchor",
        "behaviour",
        "current",
        "log_ratio",
        "sequence_log_ratio",
        "sequences",
        "turns",
        "turns_of_episodes",
    ],
    "Tool": [
        "class(ABC) () -> 'None'",
        "arguments",
        "call(self, arguments: 'Any', episode: 'ToolEpisode') -> 'str | Awaitable[str]'",
        "close(self) -> 'None'",
        "ends_calls",
        "max_running",
        "options",
        "prepare(self) -> 'None'",
        "schema(self) -> 'dict[str, Any]'",
        "with_options(self, given: 'Mapping[str, Any]', place: 'str') -> 'Self'",
    ],
    "ToolArguments": [
        "class(BaseModel) () -> None",
        "model_config",
    ],
    "ToolCall": [
        "dataclass() (id: 'str', name: 'str', arguments: 'str') -> None",
        "arguments",
        "as_dict(self) -> 'dict[str, Any]'",
        "id",
        "name",
    ],
    "ToolEpisode": [
        "dataclass() (seed: 'int', row: 'Row', kept: 'dict[str, Any]' = <factory>) -> None",
        "kept",
        "row",
        "seed",
    ],
    "ToolError": [
        "class(PenstockError)",
    ],
    "ToolUnavailable": [
        "class(PenstockError)",
    ],
    "Trajectory": [
        "dataclass() (token_ids: 'Int32s', loss_mask: 'Bools', behaviour_logprobs: 'Float32s', version_runs: 'tuple[VersionRun, ...]', finish_reason: 'FinishReason', completion_text: 'str', is_baseline: 'bool' = False, experts: 'ExpertChoices | None' = None, images: 'RowImages | None' = None) -> None",
        "behaviour_logprobs",
        "completion_text",
        "experts",
        "finish_reason",
        "images",
        "is_baseline",
        "loss_mask",
        "newest_version",
        "num_completion_tokens",
        "of_checked_values(token_ids: 'Int32s', loss_mask: 'Bools', behaviour_logprobs: 'Float32s', version_runs: 'tuple[VersionRun, ...]', finish_reason: 'FinishReason', completion_text: 'str', is_baseline: 'bool', *, experts: 'ExpertChoices | None' = None, images: 'RowImages | None' = None) -> 'Trajectory'",
        "oldest_version",
        "token_ids",
        "version_runs",
    ],
    "TurnEnvironment": [
        "class(EpisodeEnvironment) () -> 'None'",
        "attempt(self, site: 'Site', begun: 'Begun', sampler: 'Sampler') -> 'Attempt'",
        "close(self) -> 'None'",
        "defined(self, name: 'str', definition: 'EnvironmentDefinition') -> 'Self'",
        "kept_staleness",
        "limits(self) -> 'EpisodeLimits'",
        "never_call(self, servers: 'Sequence[OwnServer]') -> 'None'",
        "new_registry(self, store: 'KeyValue') -> 'ServerRegistry'",
        "options",
        "play(self, seed: 'int', row: 'Row', options: 'Any') -> 'Play'",
        "registered",
        "rollout(self, tasks: 'Sequence[Task]', sampler: 'Sampler') -> 'list[list[Episode] | TaskRefused]'",
        "use_images(self, images: 'RunImages') -> 'None'",
        "use_model(self, folder: 'Path', context_tokens: 'int | None') -> 'None'",
        "use_registry(self, registry: 'ServerRegistry') -> 'None'",
        "use_worker(self, store: 'EpisodeStore', running: 'asyncio.Semaphore | None') -> 'None'",
        "version",
    ],
    "WeightCap": [
        "class(Options) (*, weight_cap: typing.Annotated[float, Gt(gt=0)] = 4.0) -> None",
        "model_config",
    ],
    "__version__": [
        "str",
    ],
    "advantage_estimator": [
        "function(*, options: 'type[OptionsT_co]' = <class 'penstock.trainer.algorithm.parts.Options'>, source: 'str', presets: 'Mapping[str, Mapping[str, Any]] | None' = None, needs_baseline: 'bool' = False, group_relative: 'bool' = False, has_critic: 'bool' = False, by_turn: 'bool' = False) -> 'Callable[[AdvantageFunction], Estimator[OptionsT_co]]'",
    ],
    "correction": [
        "function(*, options: 'type[OptionsT_co]' = <class 'penstock.trainer.algorithm.parts.Options'>, source: 'str', switch: 'str' = '', presets: 'Mapping[str, Mapping[str, Any]] | None' = None, repeats_ratio: 'bool' = False) -> 'Callable[[CorrectionFunction], Correction[OptionsT_co]]'",
    ],
    "done": [
        "function(reward: 'float', **parts: 'float') -> 'Reply'",
    ],
    "group_filter": [
        "function(*, options: 'type[OptionsT_co]' = <class 'penstock.trainer.algorithm.parts.Options'>, source: 'str', reason: 'str', switch: 'str' = '', precedence: 'int' = 100) -> 'Callable[[GroupFilterFunction], GroupFilter[OptionsT_co]]'",
    ],
    "none_of": [
        "function(like: 'Tensor') -> 'Tensor'",
    ],
    "policy_loss": [
        "function(*, options: 'type[OptionsT_co]' = <class 'penstock.trainer.algorithm.parts.Options'>, source: 'str', presets: 'Mapping[str, Mapping[str, Any]] | None' = None, uses_ratio: 'bool' = True) -> 'Callable[[PolicyLoss], Loss[OptionsT_co]]'",
    ],
    "say": [
        "function(text: 'str', reward: 'float' = 0.0) -> 'Reply'",
    ],
    "trajectory_filter": [
        "function(*, options: 'type[OptionsT_co]' = <class 'penstock.trainer.algorithm.parts.Options'>, source: 'str', reason: 'str', switch: 'str' = '', reads_advantage: 'bool' = True, precedence: 'int' = 100) -> 'Callable[[FilterFunction], Filter[OptionsT_co]]'",
    ],
}


def describe(value: Any) -> list[str]:
    """Return kind and signature of a public object, and of each public member of a Penstock class."""
    if not inspect.isclass(value):
        return [_signature("function", value)] if inspect.isroutine(value) else [type(value).__name__]
    bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
    kind = "dataclass" if dataclasses.is_dataclass(value) else "class"
    signature = "" if issubclass(value, Exception) else str(inspect.signature(value))
    # typing caches Annotated types, and Gt(0) equals Gt(0.0): either may be shown
    signature = re.sub(r"(?<=[=(])(-?[0-9]+)[.]0(?=[),])", r"\1", signature)
    lines = [f"{kind}({bases}) {signature}".strip()]
    for name in sorted(name for name in dir(value) if not name.startswith("_")):
        member = inspect.getattr_static(value, name)
        if (owner := _owner(value, name)) is None or not owner.__module__.startswith("penstock."):
            continue
        if inspect.isfunction(member) or isinstance(member, staticmethod | classmethod):
            lines.append(_signature(name, getattr(value, name)))
        else:
            lines.append(name)
    return lines


def _owner(cls: type, name: str) -> type | None:
    return next((base for base in cls.__mro__ if name in vars(base)), None)


def _signature(name: str, function: Any) -> str:
    return f"{name}{inspect.signature(function)}"


def test_the_public_interface_is_the_list():
    """Names, kinds, signatures and members are those that users were given."""
    found = {name: describe(getattr(penstock, name)) for name in sorted(penstock.__all__)}
    shown = "\n".join(f"    {name!r}: {lines!r}," for name, lines in found.items() if INTERFACE.get(name) != lines)
    gone = sorted(set(INTERFACE) - set(found))
    assert found == INTERFACE, f"removed: {gone}; new or changed:\n{shown}"


def test_import_penstock_is_light():
    """``import penstock`` imports no other Penstock module and no library; its names need no torch."""
    code = (
        "import sys; before = set(sys.modules); import penstock\n"
        "more = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "assert not [name for name in sys.modules if name.startswith('penstock.')]\n"
        "assert more - set(sys.stdlib_module_names) == {'penstock'}, more\n"
        "assert {*penstock.__all__} <= set(dir(penstock))\n"
        "[getattr(penstock, name) for name in penstock.__all__]\n"
        "assert 'torch' not in sys.modules\n"
        "try: penstock.nothing\n"
        "except AttributeError as err: assert 'public are' in str(err)\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


def test_every_public_name_is_documented():
    """docs/extending.md names each."""
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    assert [name for name in penstock.__all__ if name not in text] == []
