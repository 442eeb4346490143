"""The job that every mode does: its size, its durations, and the run file that says so to the services."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from tests.rigs.simulated_engine import SimulatedOptions

from penstock.deploy import quickstart_task

GROUP_SIZE = 8
_CONTEXT = 2048  # positions of the tiny model
_RUN_FILE = """\
run = {{ id = "{run_id}", dir = "{folder}/runs", seed = 0 }}
model = {{ path = "{folder}/model" }}
reward = {{ name = "exact_match" }}

[data]
train = "{folder}/data/train.jsonl"
max_prompt_tokens = 32
{evaluation}
[rollout]
groups_per_step = {groups_per_step}
group_size = {group_size}
redundant_completions = {redundant}
redundant_wait = {wait}
groups_per_message = 1
max_staleness = {max_staleness}
max_new_tokens = {longest}
max_attempts = 100

[trainer]
steps = {steps}
lr = 1e-6
checkpoint_every = 100000
checkpoint_every_s = 0.0
check_texts = 0
store_logprobs = 0
keep_versions = {keep_versions}
micro_batch_tokens = 4096
max_mismatch = 1000.0

[worker]
engine = "tests.rigs.simulated_engine:SIMULATED"
engine_options = {{ {options} }}
packs_in_flight = {packs_in_flight}
update_mode = "{update_mode}"
"""


_EVALUATION = """\
eval = "{folder}/data/eval.jsonl"

[eval]
every = {every}
at_start = false
at_end = false
temperature = 1.0
"""


@dataclass(frozen=True)
class Mode:
    """How far generation may run ahead of training, and how new weights reach running sequences."""

    name: str
    max_staleness: int
    update_mode: str = "in_place"
    redundant: int = 0  # completions of a group that are started besides
    wait: float = 0.0  # `rollout.redundant_wait`

    def with_redundancy(self, redundant: int, wait: float) -> Mode:
        """Return the mode with completions that are started besides, named in its name."""
        if not redundant:
            return self
        name = f"{self.name}, {GROUP_SIZE} + {redundant}" + (f", wait {wait:g}" if wait else "")
        return replace(self, name=name, redundant=redundant, wait=wait)


MODES = (
    Mode("synchronous", 0),
    Mode("one step off", 1, "drain"),
    Mode("asynchronous, 1", 1),
    Mode("asynchronous, 2, drain", 2, "drain"),
    Mode("asynchronous, 2", 2),
    Mode("asynchronous, 4, drain", 4, "drain"),
    Mode("asynchronous, 4", 4),
    Mode("asynchronous, 8, drain", 8, "drain"),
    Mode("asynchronous, 8", 8),
)


@dataclass(frozen=True)
class Job:
    """Sizes and durations; seconds are those of the real clock."""

    num_workers: int
    engine: SimulatedOptions
    groups_per_worker: int = 6  # of a step
    packs_in_flight: int = 8
    train_share: float = 1.0  # seconds of training, in seconds of generation by engines that are always full
    step_s: float = 0.1  # of a step besides its tokens
    measured: int = 8  # steps
    first: int = 4  # step from which is measured: the ones before fill the queues
    eval_every: int = 0  # steps; 0: no evaluation
    eval_prompts: int = 64
    last: int = 0  # steps after that: near its end a run issues less

    @property
    def groups_per_step(self) -> int:
        return self.groups_per_worker * self.num_workers

    @property
    def tokens_per_s(self) -> float:
        """Tokens that all engines generate in a second with all slots in use."""
        return self.num_workers * self.engine.pace.tokens_per_s

    @property
    def token_s(self) -> float:
        """Seconds of training for a sampled token."""
        return self.train_share / self.tokens_per_s

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return self.first + self.measured + self.last

    @property
    def ideal_tokens_per_s(self) -> float:
        """Trained tokens in a second if the slower role never waited: 1 / largest share."""
        per_step = self.groups_per_step * GROUP_SIZE * self.engine.mix.mean_tokens
        return min(self.tokens_per_s, per_step / (self.step_s + per_step * self.token_s))

    def for_mode(self, mode: Mode) -> Job:
        """Return the job with as many steps before and after those that are measured as the mode needs."""
        first, last = steps_around(mode)
        if mode.max_staleness == 0:  # each worker takes its share at once, no more: otherwise one would take another's
            return replace(self, packs_in_flight=self.groups_per_worker, first=first, last=last)
        return replace(self, first=first, last=last)


def steps_around(mode: Mode) -> tuple[int, int]:
    """Return how many steps of a mode come before those that are measured, and after them."""
    return (2, 0) if mode.max_staleness == 0 else (mode.max_staleness + 3, mode.max_staleness + 1)


def write_inputs(folder: Path, mode: Mode, *, steps: int, groups_per_step: int, num_eval: int) -> None:
    """Write model and data of a run with so many steps."""
    num_prompts = (steps + mode.max_staleness + 2) * groups_per_step
    quickstart_task.write_data(folder / "data", seed=0, num_sft=1, num_train=num_prompts, num_eval=num_eval)
    quickstart_task.write_model(folder / "model", seed=0)
    config = folder / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": _CONTEXT}))


def write_run(folder: Path, job: Job, mode: Mode) -> Path:
    """Write model, data and run file; return the run file."""
    write_inputs(folder, mode, steps=job.steps, groups_per_step=job.groups_per_step, num_eval=job.eval_prompts)
    traced = job.engine.model_copy(update={"trace": str(folder / "trace")})
    run_file = folder / "run.toml"
    options = ", ".join(f"{key} = {json.dumps(value)}" for key, value in traced.model_dump().items())
    run_file.write_text(
        _RUN_FILE.format(
            run_id="asynchrony",
            folder=folder,
            groups_per_step=job.groups_per_step,
            group_size=GROUP_SIZE,
            redundant=mode.redundant,
            wait=mode.wait,
            max_staleness=mode.max_staleness,
            longest=job.engine.longest_tokens,
            steps=job.steps,
            options=options,
            packs_in_flight=job.packs_in_flight,
            keep_versions=mode.max_staleness + 8,
            update_mode=mode.update_mode,
            evaluation=_EVALUATION.format(folder=folder, every=job.eval_every) if job.eval_every else "",
        )
    )
    return run_file
