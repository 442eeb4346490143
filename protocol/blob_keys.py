"""Object keys from ids; the only file with key literals.

Keys are immutable: an operation that may be repeated uses a new attempt id, so that no object is
overwritten (an S3 server may fail a reader of an object that is being replaced).
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.protocol.versions import PolicyVersion


def _below(folder: str) -> Callable[[str], str]:
    """Return the function from a run's id to the prefix of its keys in ``folder``."""
    return lambda run_id: f"runs/{run_id}/{folder}"


all_finished_episodes_prefix = _below("episodes/")
task_lists_prefix = _below("tasks/")
layouts_prefix = _below("layout/")
models_prefix = _below("model/")
images_prefix = _below("images/")
rescored_prefix = _below("input/")
checkpoints_prefix = _below("checkpoints/")
lineage_prefix = _below("lineage/")
logprobs_prefix = _below("logprobs/")
run_prefix = _below("")
groups_prefix = _below("groups/")
all_weights_prefix = _below("weights/")
# No object has this one: to list it shows whether the store answers and accepts the credentials.
access_check_prefix = _below("check/")


def group_pack(run_id: str, version: PolicyVersion, pack_id: str, attempt_id: str) -> str:
    """Return the key of a Parquet pack of groups; ``version`` is the oldest that sampled it."""
    return f"runs/{run_id}/groups/v{version:08d}/{pack_id}.{attempt_id}.parquet"


def finished_episodes_prefix(run_id: str, group_id: str, attempt: int) -> str:
    return f"{all_finished_episodes_prefix(run_id)}{group_id}/{attempt}/"


def finished_episode(prefix: str, kind: str, index: int, sha256: str) -> str:
    """Return the key of one such episode, addressed by content; ``kind`` is ``sampled`` or ``greedy``."""
    return f"{prefix}{kind}.{index}.{sha256}.parquet"


def task_list(run_id: str, pack_id: str) -> str:
    return f"runs/{run_id}/tasks/{pack_id}.msgpack"


def weights_prefix(run_id: str, version: PolicyVersion) -> str:
    return f"runs/{run_id}/weights/v{version:08d}/"


def weights_shard(run_id: str, version: PolicyVersion, attempt_id: str, name: str) -> str:
    """Return the key of one shard; ``attempt_id`` is fresh for every publication attempt."""
    return f"runs/{run_id}/weights/v{version:08d}/{attempt_id}/{name}"


def weights_pack(run_id: str, version: PolicyVersion, attempt_id: str, rank: int) -> str:
    """Return the key of one publishing rank's patch segments, one after another."""
    return f"runs/{run_id}/weights/v{version:08d}/{attempt_id}/r{rank:03d}.pack"


def weights_layout(run_id: str, layout_id: str) -> str:
    return f"runs/{run_id}/layout/{layout_id}.json"


def weights_manifest(run_id: str, version: PolicyVersion, attempt_id: str) -> str:
    return f"runs/{run_id}/weights/v{version:08d}/{attempt_id}/manifest.json"


def model_file(run_id: str, sha256: str, name: str) -> str:
    return f"runs/{run_id}/model/{sha256[:16]}/{name}"


def image(run_id: str, sha256: str) -> str:
    return f"{images_prefix(run_id)}{sha256}"


def lineage_chapter(run_id: str, number: int, epoch: int, attempt_id: str) -> str:
    return f"runs/{run_id}/lineage/chapter{number:08d}.e{epoch:04d}.{attempt_id}.msgpack"


def lineage_config(run_id: str, sha256: str) -> str:
    return f"runs/{run_id}/lineage/config.{sha256[:16]}.json"


def rescored_input(run_id: str, sha256: str) -> str:
    return f"runs/{run_id}/input/input.{sha256}.msgpack"


def rescored_piece(run_id: str, number: int, sha256: str) -> str:
    return f"runs/{run_id}/input/piece{number:08d}.{sha256[:16]}.msgpack"


def input_users_prefix(run_id: str) -> str:
    """Return the prefix of the markers of runs that train on a rescored input; the run id follows it."""
    return f"{rescored_prefix(run_id)}used-by/"


def checkpoint_file(run_id: str, epoch: int, sha256: str) -> str:
    return f"runs/{run_id}/checkpoints/e{epoch:04d}/files/{sha256}"


def checkpoint_state(run_id: str, epoch: int, sha256: str) -> str:
    """Return the key of a checkpoint's ``state.json``, stored last; ``epoch`` is the one in it, ``sha256`` that of the file."""
    return f"runs/{run_id}/checkpoints/e{epoch:04d}/{sha256}/state.json"


def checkpoint_metrics(run_id: str, epoch: int, state_sha256: str, sha256: str) -> str:
    return f"runs/{run_id}/checkpoints/e{epoch:04d}/{state_sha256}/metrics.{sha256}.jsonl"


def rescored_sha256(run_id: str, key: str) -> str:
    """Return the sha256 in the key of a rescored input; empty for any other key."""
    name = key.removeprefix(rescored_prefix(run_id))
    return name[6:70] if name.startswith("input.") and name.endswith(".msgpack") and len(name) == 78 else ""


def owner_of_pack(key: str) -> str:
    return key.partition("/groups/")[0].removeprefix("runs/")


def copied_pack(run_id: str, key: str) -> str:
    return groups_prefix(run_id) + key.partition("/groups/")[2]


def step_logprobs_prefix(run_id: str, step: int, epoch: int) -> str:
    return f"{logprobs_prefix(run_id)}s{step:08d}.e{epoch:04d}/"


def step_logprobs(run_id: str, step: int, epoch: int, sha256: str) -> str:
    return f"{step_logprobs_prefix(run_id, step, epoch)}{sha256}.safetensors"


def version_of_weights(run_id: str, key: str) -> PolicyVersion:
    folder = key.removeprefix(all_weights_prefix(run_id)).split("/", 1)[0]
    return PolicyVersion(int(folder.removeprefix("v")))
