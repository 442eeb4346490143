"""`penstock.Client`: start runs and trainings from Python."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import structlog

from penstock.client import run_settings
from penstock.client.data_files import Data
from penstock.client.handles import FineTuning, Run
from penstock.client.remote.runs_api import RunsApi
from penstock.client.run_settings import Values
from penstock.protocol.errors import ConfigError
from penstock.protocol.subjects import check_run_id

if TYPE_CHECKING:
    from penstock.console.evaluation_results import EvaluationResult

LOCAL = "local"

Handle = TypeVar("Handle", Run, FineTuning)
Settings = Mapping[str, Any]
Model = str | os.PathLike[str] | Settings
Rewards = str | Callable[..., Any] | Settings


class Client:
    """Starts runs: on this machine with every service they need, or through the Runs API of a `penstock console`.

        client = penstock.Client()
        run = client.train(model="models/Qwen3-0.6B", data=rows, reward=my_function, trainer={"steps": 200})
        run.wait()

    Runs of this machine that are going on when this Python process ends are stopped, whatever ended it; leaving a ``with``
    block stops them too. Runs of a console go on. A client may be used from several threads.
    """

    def __init__(self, where: str = LOCAL, *, token: str | None = None, runs: str | os.PathLike[str] = "runs") -> None:
        """Prepare; starts nothing.

        Args:
            where: "local", or the URL of a `penstock console`, such as "http://127.0.0.1:8800".
            token: A token of the console with the role ``run`` (`penstock console token NAME --role run`).
            runs: Folder of the runs' folders; of a console on this machine the folder of rows that calls bring.

        Raises ConfigError for any other place.
        """
        self._api = None if where == LOCAL else RunsApi(where, token)
        # The modules that this process uses log errors only, unless the program has configured structlog itself.
        if not structlog.is_configured():
            errors_only = structlog.make_filtering_bound_logger(logging.ERROR)
            structlog.configure(wrapper_class=errors_only, logger_factory=structlog.PrintLoggerFactory(sys.stderr))
        self._runs = Path(runs).absolute()
        self._started: list[Run | FineTuning] = []

    def train(
        self,
        *,
        model: Model,
        data: Data | Settings,
        reward: Rewards,
        algorithm: str | Settings = "async_grpo",
        run_id: str | None = None,
        workers: int | None = None,
        **settings: Any,
    ) -> Run:
        """Start a run of reinforcement learning and return its handle; the run trains in the background.

        Args:
            model: A Hugging Face model folder, a GGUF file, or "quickstart": the tiny model of `penstock quickstart`.
            data: A file, folder or hub id, or rows: an iterable of dictionaries, such as a list or a `datasets.Dataset`
                (docs/data.md has the forms). Rows are written into the run's folder.
            reward: The name of a reward, or a function: TRL's ``f(completions, **columns)``, verl's ``compute_score(data_source,
                solution_str, ground_truth, extra_info)`` or another form of docs/rewards.md. A function is called in this
                process; an exception is a failure of its group (`penstock reward errors RUN`), never a reward of 0.
            algorithm: Name of an algorithm (docs/algorithms.md).
            run_id: Name of the run; None: the first free one of run, run-2, …. A run that was stopped is continued.
            workers: Rollout workers; None: 2, with engines on GPUs one for all of them.
            settings: Any other keys of the run file, nested or with dotted names: ``trainer={"steps": 100}`` or
                ``**{"trainer.steps": 100}``.

        ``model``, ``data``, ``reward`` and ``algorithm`` may each be the whole section of the run file instead, with further
        keys: ``data={"train": rows, "eval": held_out, "max_prompt_tokens": 64}``.

        Raises:
            ConfigError: A setting is unknown or wrong; nothing was started.
            PenstockError: The run ended before its reward was registered.
        """
        values = self._values(
            run_id,
            run_settings.section("model", model, "path"),
            run_settings.section("data", data, "train"),
            run_settings.section("reward", reward, "name"),
            run_settings.section("algorithm", algorithm, "name"),
            run_settings.flat(settings),
        )
        if self._api is not None:
            from penstock.client.remote import remote_backend  # noqa: PLC0415 - needs the extra of the reward service

            return self._kept(Run(remote_backend.train(self._api, values, self._runs, workers=workers)))
        from penstock.client import local_start  # noqa: PLC0415 - needs the extras of every service

        return self._kept(Run(local_start.train(values, self._runs, workers=workers)))

    def run(self, run_id: str) -> Run:
        """Return the handle of a run that exists, whoever started it; raises PenstockError when there is none."""
        if self._api is not None:
            from penstock.client.remote.remote_backend import RemoteBackend  # noqa: PLC0415 - as above

            return self._kept(Run(RemoteBackend(self._api, check_run_id(run_id))))
        from penstock.client import local_start  # noqa: PLC0415 - as above

        return self._kept(Run(local_start.existing(run_id, self._runs)))

    def sft(self, *, model: Model, data: Data | Settings, run_id: str | None = None, **settings: Any) -> FineTuning:
        """Start supervised fine-tuning (`penstock sft`) and return its handle.

        Args:
            model: As in `train`.
            data: Chats or pairs of prompt and answer, as a path or rows.
            run_id: Name of the run; None: the first free one of sft, sft-2, ….
            settings: Keys of the run file, such as ``sft={"steps": 300, "lr": 1e-5}``.

        Raises ConfigError when a setting is unknown or wrong; nothing was started.
        """
        return self._fine_tune("sft", model, data, run_id, settings)

    def dpo(self, *, model: Model, data: Data | Settings, run_id: str | None = None, **settings: Any) -> FineTuning:
        """Start training on preferences (`penstock dpo`) and return its handle.

        Args:
            model: As in `train`.
            data: Rows with a prompt, a chosen and a rejected answer, as a path or rows.
            run_id: Name of the run; None: the first free one of dpo, dpo-2, ….
            settings: Keys of the run file, such as ``dpo={"epochs": 1, "beta": 0.1}``.

        Raises ConfigError when a setting is unknown or wrong; nothing was started.
        """
        return self._fine_tune("dpo", model, data, run_id, settings)

    def evaluate(
        self,
        target: Run | FineTuning | str | os.PathLike[str],
        data: Data,
        *,
        version: int | str | None = None,
        samples: int = 1,
        reward: str | os.PathLike[str] | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        workers: int = 1,
        **settings: Any,
    ) -> EvaluationResult:
        """Evaluate a model by `penstock eval` and return its result, when it is over; failed prompts are named, never 0.

        Args:
            target: A model folder, a run or its id, or what `sft` or `dpo` trained.
            data: Held-out prompts, as a path or rows.
            version: Of a run: a number, "best", "head" or a tag; None: its final model.
            samples: Samples of each prompt, the k of avg@k, pass@k and maj@k.
            reward: Name of a reward, or a Python file with one; None: that of the run, else by the row's data source.
            temperature: Of sampling; None: ``eval.temperature``, for several samples ``rollout.temperature``.
            max_tokens: Longest completion; None: that of the settings.
            workers: Rollout workers.
            settings: Any other keys of the run file.

        The same call, again after it was interrupted, samples only the prompts that are missing.

        Raises:
            ConfigError: The reward is a function, or the client is that of a console.
            RunFailed: The evaluation ended with an error; the text has the end of its log.
        """
        if self._api is not None:
            raise ConfigError("the Runs API has no evaluate: use penstock.Client(), on the machine with the model")
        from penstock.client import evaluation  # noqa: PLC0415 - as above

        options = {
            "samples": samples,
            "reward": reward,
            "temperature": temperature,
            "max_tokens": max_tokens,
            "workers": workers,
        }
        return evaluation.evaluate(_target_name(target, version), data, self._runs, options, settings)

    def close(self) -> None:
        """Stop what this client has started on this machine and is still going on; idempotent."""
        for handle in self._started:
            handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fine_tune(self, verb: str, model: Model, data: Any, run_id: str | None, settings: Settings) -> FineTuning:
        data_section = run_settings.section(verb, data, "data")
        values = self._values(
            run_id, run_settings.section("model", model, "path"), data_section, run_settings.flat(settings)
        )
        if self._api is not None:
            from penstock.client.remote import remote_backend  # noqa: PLC0415 - as above

            return self._kept(FineTuning(verb, remote_backend.fine_tune(self._api, verb, values, self._runs)))
        from penstock.client import local_start  # noqa: PLC0415 - as above

        return self._kept(FineTuning(verb, local_start.fine_tune(verb, values, self._runs)))

    def _kept(self, handle: Handle) -> Handle:
        self._started.append(handle)
        return handle

    def _values(self, run_id: str | None, *parts: Values) -> Values:
        return run_settings.merged({} if run_id is None else {("run", "id"): run_id}, *parts)


def _target_name(target: Run | FineTuning | str | os.PathLike[str], version: int | str | None) -> str:
    """Return what `penstock eval` calls it; raises ConfigError for a version of what is no run."""
    if isinstance(target, FineTuning):
        target = target.model
    name = target.id if isinstance(target, Run) else os.fspath(target)
    if version is None:
        return name
    if not isinstance(target, Run | str) or "/" in name or "@" in name:
        raise ConfigError(f"version={version!r}: {name} has no versions; they belong to runs")
    return f"{name}@{version}"
