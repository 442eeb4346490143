"""The dialect of Penstock: send a batch of groups, receive every group's scores in any order."""

from __future__ import annotations

from pydantic import ValidationError

from penstock.reward_service.endpoints.dialects.dialect import BadAnswer, Call, Dialect, DialectKind
from penstock.reward_service.endpoints.wire import GroupScore, Score, ScoreRequest, ScoreResponse
from penstock.serving import strict_json

_FIELDS = frozenset({*ScoreResponse.model_fields, *GroupScore.model_fields, *Score.model_fields})


class PenstockDialect(Dialect):
    """`ScoreRequest` and `ScoreResponse` of `reward_service/endpoints/wire.py`; it has no options."""

    def request(self, call: Call) -> bytes:
        request = ScoreRequest(request_id=call.request_id, reward=call.reward, groups=list(call.groups))
        return request.model_dump_json().encode()

    def read(self, call: Call, answer: bytes) -> list[list[Score]]:
        response = _response(answer)
        results = {result.group_id: result.scores for result in response.results}
        sent = [group.group_id for group in call.groups]
        if len(results) != len(response.results) or set(results) != set(sent):
            missing = [group_id for group_id in sent if group_id not in results]
            others = len(response.results) - len(sent) + len(missing)
            raise BadAnswer(
                f"answers for {len(response.results)} groups, {len(sent)} were sent; results are missing for "
                f"{', '.join(missing[:3]) or 'none'}, and {others} are for other groups or come twice"
            )
        return [results[group_id] for group_id in sent]


def _response(answer: bytes) -> ScoreResponse:
    """Validate an answer; the error names the first field that does not fit, never its content."""
    try:
        strict_json.loads(answer, strict_json.MAX_DEPTH)
        return ScoreResponse.model_validate_json(answer)
    except strict_json.AmbiguousJson as err:
        raise BadAnswer(f"does not answer as agreed: {err}") from None
    except ValidationError as err:
        first = err.errors(include_input=False, include_context=False)[0]
        place = ".".join(str(step) if isinstance(step, int) or step in _FIELDS else "*" for step in first["loc"])
        raise BadAnswer(f"does not answer as agreed: {place or 'body'}: {first['msg']}") from None


PENSTOCK = DialectKind("penstock", PenstockDialect)
