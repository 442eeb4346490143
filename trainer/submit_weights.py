"""Copies the weights of all ranks, and hands them to the publisher and to the run record."""

from __future__ import annotations

from penstock.protocol.record.checkpoint_state import CheckpointState
from penstock.protocol.versions import PolicyVersion, next_version
from penstock.trainer.errors import CheckpointError
from penstock.trainer.learner.learner import Learner
from penstock.trainer.publishing.publish import Publisher
from penstock.trainer.publishing.weight_buckets import Snapshot, Weights
from penstock.trainer.recovery.run_record_writer import RunRecordWriter
from penstock.trainer.settings import TrainerSettings

PUBLICATION_DEADLINE_S = 600.0


class WeightSubmitter:
    """Submits one version after another; for the training thread only."""

    def __init__(
        self, settings: TrainerSettings, learner: Learner, publisher: Publisher, record_writer: RunRecordWriter
    ) -> None:
        self._settings, self._learner, self._publisher = settings, learner, publisher
        self._record_writer = record_writer

    @property
    def dtype(self) -> str:
        chosen = self._settings.trainer.publish_dtype
        return self._learner.policy.dtype if chosen == "as-trained" else chosen

    def submit(self, version: PolicyVersion, *, must_publish: bool) -> None:
        self._submit(self._copy(), version, must_publish=must_publish)

    def submit_first(self, resumed: CheckpointState | None) -> tuple[PolicyVersion, bool]:
        """Publish the session's first weights; return their version, False if they were the head already.

        Version numbers never decrease: after a crash the checkpoint's weights get the number after the newest one that was ever
        published. Where a resumed run finds no base of its adapters, it is stored under a version number of its own. Raises
        CheckpointError if the weights are not those of the checkpoint's state, and PublicationFailed.
        """
        version = PolicyVersion(resumed.version if resumed else 0)
        head = self._publisher.head
        weights = self._copy()
        self._check_resumed(resumed)
        parent = resumed.version if resumed else None
        if head is not None and head.version == parent and self._publisher.resume(weights, self.dtype):
            return version, False
        version = next_version(PolicyVersion(head.version)) if head is not None else version
        if (base := self._publisher.missing_base(weights)) is not None:
            base_version = next_version(version)
            self._publisher.store_base(base, base_version, self._learner.policy.steps_done, self.dtype)
            version = next_version(base_version)
        self._submit(weights, version, must_publish=True)
        self._publisher.wait_until_published(version, PUBLICATION_DEADLINE_S)
        return version, True

    def _copy(self) -> Weights:
        chosen = self._settings.trainer.publish_dtype
        dtype = None if chosen == "as-trained" else chosen
        wanted = self._publisher.drop_overtaken()
        weights = self._learner.weights(dtype, as_adapter=self._settings.publishes_adapters, wanted=wanted)
        self._record_writer.set_weights(weights.root_later())
        return weights

    def _submit(self, weights: Weights, version: PolicyVersion, *, must_publish: bool) -> None:
        step = self._learner.policy.steps_done
        is_last = step == self._settings.trainer.steps
        self._publisher.submit(
            Snapshot(
                version=version, step=step, weights=weights, dtype=self.dtype, must_publish=must_publish or is_last
            )
        )

    def _check_resumed(self, resumed: CheckpointState | None) -> None:
        published_as = (self.dtype, "adapter" if self._settings.publishes_adapters else "model")
        if resumed is None or (resumed.weights_dtype, resumed.weights_are) != published_as:
            return  # the digests are not comparable
        found = self._record_writer.digest()
        if found != resumed.weights_digest:
            raise CheckpointError(
                f"checkpoint of step {resumed.step}: expected weights with digest {resumed.weights_digest[:16]}…, loaded "
                f"{found[:16]}…; remove its folder to resume from the checkpoint before it"
            )
