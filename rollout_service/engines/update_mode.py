"""What becomes of running generations when an engine takes new weights.

| mode       | running sequences                                           | tokens after the update read keys and values of |
|------------|-------------------------------------------------------------|--------------------------------------------------|
| `drain`    | finish first; what is new waits for them                    | the new weights (no sequence spans two versions)  |
| `retract`  | are set aside, computed again under the new weights, go on  | the new weights                                   |
| `in_place` | stand still for the load and go on where they were          | whichever weights computed each of them           |
| `abort`    | come back with what they have; the worker asks for the rest | the new weights                                   |

In every mode a token keeps the log-probability and the version that it was sampled with.
"""

from __future__ import annotations

from typing import Literal

from penstock.protocol.versions import PolicyVersion, is_newer

UpdateMode = Literal["drain", "retract", "in_place", "abort"]


def mode_of(wanted: UpdateMode, serving: PolicyVersion | None, version: PolicyVersion) -> UpdateMode:
    """Return how to go from one version to another: back to an older one only when nothing runs any more.

    A generation under way is for training, an older version is loaded for an evaluation that is pinned to it: its
    tokens would be stale from birth.
    """
    return wanted if serving is not None and is_newer(version, serving) else "drain"
