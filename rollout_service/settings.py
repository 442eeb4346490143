"""The settings of the rollout worker: its sections of the run file."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from penstock.protocol.config.connection import NatsSettings, RunSettings, S3Settings, Section, secret_of
from penstock.protocol.config.environment_settings import EnvironmentSettings
from penstock.protocol.config.shared_sections import MetricsSettings, PlacementSettings, TeacherSettings
from penstock.protocol.errors import ConfigError
from penstock.protocol.groups import Split
from penstock.rollout_service.engines.engine_client import LONG_TOKENS, UpdateMode
from penstock.rollout_service.engines.engine_kind import ENGINES, EngineKind
from penstock.rollout_service.engines.sglang.kind import SglangSettings
from penstock.rollout_service.engines.vllm.kind import VllmSettings
from penstock.rollout_service.environments.environment import ENVIRONMENTS, load_environments
from penstock.rollout_service.packs.pack_loops import MOST_PACKS
from penstock.rollout_service.teachers.teacher import TEACHERS

if TYPE_CHECKING:
    from penstock.protocol.weights.signature import TrustedKeys

_WORKER_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def default_worker_id() -> str:
    return f"{re.sub(r'[^A-Za-z0-9_-]', '-', socket.gethostname())[:48] or 'worker'}-{os.getpid()}"


@contextlib.contextmanager
def _config_errors() -> Iterator[None]:
    try:
        yield
    except ConfigError as err:
        raise ValueError(str(err)) from None


class WorkerSettings(Section):
    """The worker and its engine."""

    id: str = Field(
        default_factory=default_worker_id,
        description="Name of this worker in messages, heartbeats and folders; unique among running workers.",
    )
    engine: str = Field(
        "embedded",
        description="'embedded': Penstock's own torch engine as a child process; 'sglang', 'vllm': servers that the "
        "worker starts, see [sglang] and [vllm]; 'sglang-url', 'vllm-url': servers that already run at "
        "worker.engine_url; or your own engine as 'my_package.module:kind' or 'my_engine.py:kind'.",
    )
    engine_url: str = Field(
        "", description="URL of the server, for engine = 'sglang-url' or 'vllm-url'; several with commas between them."
    )
    engine_options: dict[str, Any] = Field(
        {},
        description="Options of an engine that has no section of its own, as that engine's class of options defines them.",
    )
    environments: tuple[str, ...] = Field(
        (),
        description="Your own environments that tasks may name, as 'my_package.module:environment' or "
        "'my_environment.py:environment', besides the built-in and installed ones; no other code is loaded for a task.",
    )
    engine_api_key_file: Path | None = Field(
        None, description="File with the key that the server was started with (SGLang's admin key if it has one)."
    )
    packs_in_flight: int = Field(
        0,
        ge=0,
        le=MOST_PACKS * 64,
        description="Packs worked on at once. 0: as many as the engines make use of, by the sequences and tokens per second that "
        "they report; 2 of each server at first.",
    )
    max_episodes: int = Field(
        0,
        ge=0,
        description="Episodes of all environments together that the worker plays at once; others wait, and hold no place in the engine. "
        "One that waits for a tool counts, since its keys and values are kept. 0: as many as the environments allow.",
    )
    max_running: int = Field(256, ge=1, description="Sequences the embedded engine decodes at once.")
    kept_tokens: int | None = Field(
        None,
        ge=0,
        description="Tokens whose keys and values the embedded engine keeps after their sequence has ended, for prompts that begin with "
        "them: the next turn of an episode, or its group. 0: none. Default: as many as fit into 512 MiB.",
    )
    device: str = Field("cpu", description="Where the embedded engine computes: 'cpu' or 'cuda'.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Number format of the embedded engine.")
    cache_dir: Literal["auto"] | Path = Field(
        "auto",
        description="Folder for local copies of weights, two of the model; the engine's server must see the same path. 'auto': in /dev/shm "
        "where the copies of all workers of the host fit into half of the free memory, and the worker starts its engines itself "
        "without a command of yours; else 'cache' in the run's folder.",
    )
    share_downloads: bool = Field(
        True,
        description="Read weights that the trainer or another worker of this host and user has in /dev/shm, in place of a download, and leave "
        "there what is downloaded, for 10 minutes and in at most an eighth of the free memory. false: the object store alone.",
    )
    peer_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port at which workers of the run on other hosts read weights that this host has; 0: any free one. The worker listens where its "
        "host reaches nats.url from, and reads from others that do so, and from the object store where they fail. Default: the object store alone.",
    )
    trusted_keys_file: Path | None = Field(
        None,
        description="Ed25519 public keys in PEM form, such as the signing.pem of penstock certs: only weights whose manifest one of "
        "them has signed are loaded (trainer.signing_key_file). Default: signatures are not verified.",
    )
    roles: Annotated[tuple[Split, ...], Field(min_length=1)] = Field(
        ("train", "eval"), description="Which tasks to take: 'train', 'eval' or both; evaluation goes first."
    )
    request_deadline_s: float = Field(
        600.0,
        gt=0,
        description="Seconds one engine request may take before its pack is requeued; more where rollout.max_new_tokens needs "
        "it: four times what such a completion takes at the speed that was measured.",
    )
    start_deadline_s: float = Field(900.0, gt=0, description="Seconds an engine may take to load and answer.")
    max_paused_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of the run's running workers whose engines may pause for a new version at once; at least one. "
        "Engines that pause for less than half a second do not wait for each other.",
    )
    update_mode: UpdateMode | Literal["auto"] = Field(
        "auto",
        description="What happens to running generations when a newer version is loaded: 'drain': the load waits for "
        "them; 'retract': they are recomputed under the new weights and continue; 'in_place': they continue with the "
        "keys and values of the old weights; 'abort': the engine returns what they have, the worker requests the rest; "
        f"'auto': 'drain' while none may have more than {LONG_TOKENS} tokens, else 'in_place' with the embedded engine and 'retract' "
        "with SGLang and vLLM.",
    )
    check_weights_every: int = Field(
        1,
        ge=0,
        description="Every so many versions the engine's checksum of its weights is compared with the manifest or the other engines'; 0: "
        "never. It is asked for while generation goes on, and not at all where the answer to an update holds it.",
    )
    finish_s: float = Field(
        30.0,
        ge=0,
        description="Seconds that packs in flight get to finish when the worker stops; then they are requeued.",
    )
    task_attempts: int = Field(5, ge=1, description="Deliveries after which a failing pack is dead-lettered.")
    retry_delay_s: float = Field(
        1.0, ge=0, description="Seconds before a failed pack is delivered again; doubles with every attempt."
    )

    @field_validator("id")
    @classmethod
    def _valid_id(cls, value: str) -> str:
        if not _WORKER_ID.fullmatch(value):
            raise ValueError(f"must be 1 to 64 characters of a-z, A-Z, 0-9, '_' and '-', got {value!r}")
        return value

    @field_validator("engine")
    @classmethod
    def _known_engine(cls, value: str) -> str:
        with _config_errors():
            ENGINES.find(value)
        return value

    @field_validator("environments")
    @classmethod
    def _known_environments(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        with _config_errors():
            for name in value:
                ENVIRONMENTS.find(name)
        return value

    @model_validator(mode="after")
    def _engine_has_its_urls(self) -> WorkerSettings:
        urls = self.engine_urls
        if self.kind.is_attached and not (urls and all(url.startswith(("http://", "https://")) for url in urls)):
            raise ValueError(
                f"worker.engine = {self.engine!r} needs worker.engine_url, such as 'http://127.0.0.1:30000', "
                f"got {self.engine_url!r}"
            )
        if len(set(urls)) < len(urls):
            raise ValueError(f"worker.engine_url names a server twice: {self.engine_url!r}")
        if not self.kind.is_attached and self.engine_url:
            attached = f"{self.engine}-url" if f"{self.engine}-url" in ENGINES.names() else "sglang-url"
            raise ValueError(f"worker.engine_url is set, so set worker.engine = {attached!r} too, or leave both out")
        return self

    @model_validator(mode="after")
    def _peers_have_a_store(self) -> WorkerSettings:
        if self.peer_port is not None and not self.share_downloads:
            raise ValueError("worker.peer_port needs worker.share_downloads = true: peers are sent what is in /dev/shm")
        return self

    @model_validator(mode="after")
    def _engine_can_update_so(self) -> WorkerSettings:
        modes = self.kind.update_modes
        if self.update_mode not in (*modes, "auto"):
            raise ValueError(
                f"worker.update_mode = {self.update_mode!r} is not possible with engine {self.engine!r}; "
                f"use one of {', '.join(modes)}"
            )
        return self

    @model_validator(mode="after")
    def _engine_takes_its_options(self) -> WorkerSettings:
        kind = self.kind
        if kind.section and self.engine_options:
            raise ValueError(f"worker.engine_options: the options of engine {self.engine!r} are in [{kind.section}]")
        if not kind.section:
            try:
                kind.options.model_validate(self.engine_options)
            except ValidationError as err:
                problems = (f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in err.errors())
                raise ValueError("; ".join(f"worker.engine_options.{problem}" for problem in problems)) from None
        return self

    @property
    def kind(self) -> EngineKind:
        return ENGINES.find(self.engine).value

    @property
    def engine_urls(self) -> tuple[str, ...]:
        return tuple(url.strip().rstrip("/") for url in self.engine_url.split(",") if url.strip())

    def trusted_keys(self) -> TrustedKeys | None:
        """Return the keys that must have signed manifests, None when none are set; raises ConfigError when unreadable."""
        if self.trusted_keys_file is None:
            return None
        from penstock.protocol.weights.signature import TrustedKeys  # noqa: PLC0415  its library is needed only here

        return TrustedKeys.from_file(self.trusted_keys_file, "worker.trusted_keys_file")

    def engine_api_key(self) -> str:
        return secret_of("", self.engine_api_key_file, "worker.engine_api_key_file")


def _default(section: Section, key: str) -> Any:
    return type(section).model_fields[key].get_default(call_default_factory=True)


class RolloutSettings(Section):
    """The sections of a run file that the rollout worker reads."""

    run: RunSettings = RunSettings()  # pyright: ignore[reportCallIssue]
    nats: NatsSettings = NatsSettings()  # pyright: ignore[reportCallIssue]
    s3: S3Settings = S3Settings()  # pyright: ignore[reportCallIssue]
    worker: WorkerSettings = WorkerSettings()  # pyright: ignore[reportCallIssue]
    sglang: SglangSettings = SglangSettings()  # pyright: ignore[reportCallIssue]
    vllm: VllmSettings = VllmSettings()  # pyright: ignore[reportCallIssue]
    environment: EnvironmentSettings = EnvironmentSettings()  # pyright: ignore[reportCallIssue]
    teacher: TeacherSettings = TeacherSettings()  # pyright: ignore[reportCallIssue]
    metrics: MetricsSettings = MetricsSettings()  # pyright: ignore[reportCallIssue]
    placement: PlacementSettings = PlacementSettings()  # pyright: ignore[reportCallIssue]

    @model_validator(mode="after")
    def _environments_are_defined(self) -> RolloutSettings:
        if self.environment.define:
            with _config_errors():
                load_environments(self.worker.environments, self.environment.define)
        return self

    @model_validator(mode="after")
    def _engine_takes_turns(self) -> RolloutSettings:
        if self.placement.takes_turns and (problem := self.problem_of_turns):
            raise ValueError(f'placement.shared = "turns" is not possible with {problem}')
        return self

    @model_validator(mode="after")
    def _teacher_is_known(self) -> RolloutSettings:
        with _config_errors():
            TEACHERS.find(self.teacher.kind)
        return self

    @model_validator(mode="after")
    def _only_the_chosen_engine_has_options(self) -> RolloutSettings:
        chosen_section = self.worker.kind.section
        for name, section in (("sglang", self.sglang), ("vllm", self.vllm)):
            changed = sorted(key for key in section.model_fields_set if getattr(section, key) != _default(section, key))
            if changed and name != chosen_section:
                raise ValueError(
                    f"{name}.{changed[0]} does nothing with worker.engine = {self.worker.engine}; "
                    f'set worker.engine = "{name}", or remove {", ".join(f"{name}.{key}" for key in changed)}'
                )
        if chosen_section != "worker":
            self._refuse_options_of_the_embedded_engine()
        return self

    def _refuse_options_of_the_embedded_engine(self) -> None:
        for key in ("device", "dtype", "max_running", "kept_tokens"):
            if getattr(self.worker, key) != _default(self.worker, key):
                raise ValueError(
                    f"worker.{key} does nothing with worker.engine = {self.worker.engine}: it is an option of the embedded "
                    "engine; leave it out, and give that server its own"
                )

    @property
    def cache_dir(self) -> Path:
        """Folder of this worker on disk, with its copies of weights unless they are in memory; no other worker uses it."""
        base = self.run.folder / "cache" if self.worker.cache_dir == "auto" else self.worker.cache_dir
        return (base / self.run.id / self.worker.id).absolute()

    @property
    def may_use_memory(self) -> bool:
        """Whether the worker's engines see what it writes into /dev/shm: a server at a URL, or of a command, may be in a container."""
        is_own = not self.worker.kind.is_attached and not getattr(self.engine_options, "command", ())
        return is_own and self.worker.cache_dir == "auto"

    @property
    def problem_of_turns(self) -> str | None:
        """Return why the engines cannot have their GPUs in turns with the trainer, and the fix; None: they can."""
        if not self.worker.kind.may_release:
            return (
                f"worker.engine = {self.worker.engine}: its server does not release the GPU's memory, or outlives the worker; set "
                'worker.engine = "sglang", "vllm" or "embedded", or give it another GPU and set placement.shared = "never"'
            )
        if self.worker.kind.section == "vllm" and self.vllm.max_lora_rank is not None:
            return (
                "vllm.max_lora_rank: vLLM does not restore adapters after it has released its memory; use "
                'worker.engine = "sglang", or set model.lora.publish = "model" and leave vllm.max_lora_rank out'
            )
        return None

    @property
    def engine_options(self) -> Section:
        kind = self.worker.kind
        if kind.section:
            options: Section = getattr(self, kind.section)
            saves = self.placement.takes_turns and "memory_saver" in type(options).model_fields
            return options.model_copy(update={"memory_saver": True}) if saves else options
        return kind.options.model_validate(self.worker.engine_options)
