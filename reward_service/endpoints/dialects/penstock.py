"""The dialect of Penstock: send a batch of groups, receive every group's scores in any order."""

from __future__ import annotations

from penstock.reward_service.endpoints.dialects.dialect import BadAnswer, Call, Dialect, DialectKind, Payload, read_json
from penstock.reward_service.endpoints.wire import Score, ScoreRequest, ScoreResponse


class PenstockDialect(Dialect):
    """`ScoreRequest` and `ScoreResponse` of `reward_service/endpoints/wire.py`; it has no options."""

    def request(self, call: Call) -> Payload:
        request = ScoreRequest(request_id=call.request_id, reward=call.reward, groups=list(call.groups))
        return Payload(request.model_dump_json().encode())

    def read(self, call: Call, answer: bytes) -> list[list[Score]]:
        response = read_json(ScoreResponse, answer)
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


PENSTOCK = DialectKind("penstock", PenstockDialect)
