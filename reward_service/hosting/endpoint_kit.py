"""Functions for writing a reward endpoint in any Python web framework.

    from penstock.reward_service.hosting import endpoint_kit

    request = endpoint_kit.read(body, headers, secrets)             # checks the signature, then the body
    scores = [[judge(group, text) for text in group.completions] for group in request.groups]
    body = endpoint_kit.answer(request, scores)                     # numbers, or Score(error="...")

    with endpoint_kit.registered("http://127.0.0.1:8700", Offer(name="mine", url=..., version="1", lease_s=15)):
        server.serve_forever()

A score is a finite number, or a `Score` with parts or with an error. An error, or None, means *could not be
scored*: the whole group is retried later. `examples/reward_endpoint.py` is a complete endpoint. The reward service quotes
no body of another status than 200; a reason in the header `penstock-error` is shown with the error.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence

from pydantic import ValidationError

from penstock.protocol.groups import first_problem
from penstock.protocol.transport.loop_thread import LoopThread
from penstock.reward_service.endpoints.wire import GroupScore, GroupToScore, Score, ScoreRequest, ScoreResponse
from penstock.reward_service.hosting.registration import NotRegistered, Offer, RewardRegistration, ServiceAddress
from penstock.serving import signature, strict_json
from penstock.serving.signature import BadSignature

__all__ = [
    "BadRequest", "BadSignature", "GroupToScore", "NotRegistered", "Offer", "Score", "ScoreRequest", "ServiceAddress",
    "answer", "read", "registered",
]  # fmt: skip


class BadRequest(ValueError):
    """The body is not a score request; answer with status 422 and this text."""


def read(body: bytes, headers: Mapping[str, str], secrets: Sequence[str] = ()) -> ScoreRequest:
    """Return the request with the groups to score.

    ``headers`` may have names in any case. With ``secrets`` (``whsec_...``) the signature over the
    bytes received is checked before anything else. Raises BadSignature (answer 401) and BadRequest (answer 422).
    """
    if secrets:
        lower = {name.lower(): value for name, value in headers.items()}
        signature.verify(secrets, lower, body, now_s=time.time())
    try:
        return ScoreRequest.model_validate(strict_json.loads(body))
    except strict_json.AmbiguousJson as err:
        raise BadRequest(f"not a score request: {err}") from None
    except ValidationError as err:
        raise BadRequest(f"not a score request: {first_problem(err)}") from None


def answer(request: ScoreRequest, scores: Sequence[Sequence[Score | float | None]]) -> bytes:
    """Return the response body, with one list of scores for every group of the request, in the same order.

    Raises ValueError when the counts do not match or a number is not finite; the reward service would refuse both.
    """
    if len(scores) != len(request.groups):
        raise ValueError(f"expected scores for {len(request.groups)} groups, got {len(scores)}")
    results = []
    for group, group_scores in zip(request.groups, scores, strict=True):
        if len(group_scores) != len(group.completions):
            raise ValueError(
                f"group {group.group_id}: expected {len(group.completions)} scores, one per completion, got {len(group_scores)}"
            )
        results.append(GroupScore(group_id=group.group_id, scores=[_score(score, group) for score in group_scores]))
    return ScoreResponse(results=results).model_dump_json().encode()


def _score(score: Score | float | None, group: GroupToScore) -> Score:
    if isinstance(score, Score):
        return score
    if score is None:
        return Score(error="not scored")
    if not math.isfinite(score):
        raise ValueError(
            f"group {group.group_id}: score {score} is not finite; use Score(error=...) if it cannot be scored"
        )
    return Score(score=float(score))


@contextlib.contextmanager
def registered(service: ServiceAddress | str, offer: Offer) -> Iterator[None]:
    """Keep an endpoint registered while the block runs: renew its lease in a thread, unregister it at the end.

    Raises NotRegistered when the reward service refuses or cannot be reached.
    """
    address = ServiceAddress(service) if isinstance(service, str) else service
    thread, held = LoopThread("lease"), contextlib.AsyncExitStack()
    try:
        thread.start(held.enter_async_context(RewardRegistration(address, offer).registered())).result()
        yield
    finally:
        thread.start(held.aclose()).result()
        thread.stop()
