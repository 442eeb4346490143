"""What each role may do in the object store, as data; `deploy/s3_policies.py` makes a server's policies of it.

A service that begins to read, write, list or delete objects somewhere new is given the right here. The store's own user
(role ``admin`` on NATS) is not listed: it may do everything, because it creates the bucket and the other users.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.protocol import blob_keys
from penstock.protocol.rights import ANY_RUN, Role


@dataclass(frozen=True, slots=True)
class ObjectRights:
    """All that one role may do with objects, by prefixes of their keys; what is not listed is refused.

    Attributes:
        reads: Objects that it gets, by key.
        writes: Objects that it puts. A store has no right to create without one to replace, so readers verify a sha256.
        deletes: Objects that it removes.
        lists: Keys that it may list.
    """

    role: Role
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    deletes: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()


def object_rights(run_id: str = ANY_RUN) -> tuple[ObjectRights, ...]:
    """Return the rights of every role but admin, for one run or for all."""
    groups, tasks = blob_keys.groups_prefix(run_id), blob_keys.task_lists_prefix(run_id)
    weights, checkpoints = blob_keys.all_weights_prefix(run_id), blob_keys.checkpoints_prefix(run_id)
    layouts, models = blob_keys.layouts_prefix(run_id), blob_keys.models_prefix(run_id)
    lineage, logprobs = blob_keys.lineage_prefix(run_id), blob_keys.logprobs_prefix(run_id)
    inputs, check = blob_keys.rescored_prefix(run_id), blob_keys.access_check_prefix(run_id)
    episodes, images = blob_keys.all_finished_episodes_prefix(run_id), blob_keys.images_prefix(run_id)
    run = blob_keys.run_prefix(run_id)
    return (
        ObjectRights(
            "rollout",
            reads=(tasks, weights, layouts, models, episodes, images),
            writes=(groups, episodes, images),
            deletes=(episodes,),
            lists=(episodes, check),
        ),
        ObjectRights("reward", reads=(groups,), lists=(check,)),
        ObjectRights(
            "trainer",
            reads=(groups, weights, layouts, models, lineage, checkpoints, inputs, images),
            writes=(
                *(tasks, weights, layouts, models, lineage, checkpoints, logprobs, images),
                blob_keys.input_users_prefix(run_id),
            ),
            deletes=(groups, episodes, tasks, weights, checkpoints, logprobs),
            lists=(groups, episodes, tasks, weights, checkpoints, logprobs, inputs, check),
        ),
        ObjectRights("viewer", reads=(run,), lists=(run,)),
    )
