"""The fixtures of a worker, for environments that one plays."""

from tests.rollout_service.conftest import faulty_engine, model, name, start_worker, store, trainer_side  # noqa: F401
