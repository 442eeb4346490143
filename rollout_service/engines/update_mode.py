"""What happens to running generations when an engine loads new weights.

| mode       | running sequences                                           | tokens after the update read keys and values of |
|------------|-------------------------------------------------------------|--------------------------------------------------|
| `drain`    | finish first; new requests wait for them                    | the new weights (no sequence spans two versions)  |
| `retract`  | are preempted, recomputed under the new weights, continue   | the new weights                                   |
| `in_place` | pause during the load and continue where they were          | the weights that computed each of them            |
| `abort`    | return what they have; the worker requests the rest         | the new weights                                   |

In every mode a token keeps the log-probability and the version that it was sampled with.
"""

from __future__ import annotations

from typing import Literal

from penstock.protocol.versions import PolicyVersion, is_newer

UpdateMode = Literal["drain", "retract", "in_place", "abort"]


def mode_of(wanted: UpdateMode, serving: PolicyVersion | None, version: PolicyVersion) -> UpdateMode:
    """Return the mode for an update from one version to another: always ``drain`` to an older one.

    An older version is loaded for an evaluation that is pinned to it. Running generations are for training: tokens
    that they sampled from the older version would already be stale.
    """
    return wanted if serving is not None and is_newer(version, serving) else "drain"
