"""The parts of a robust call, one at a time: breaker, rate, signature, leases, tokens."""

# pyright: reportCallIssue=false  (fields of models that have defaults)

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.reward_service.api.api_models import Registration
from penstock.reward_service.endpoints.endpoint import ANONYMOUS, Access, Endpoint, Role, hashed, read_tokens
from penstock.reward_service.endpoints.endpoint_call import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    MIN_CALLS,
    Breaker,
    BreakerState,
    TokenBucket,
    outcome,
)
from penstock.reward_service.endpoints.wire import GroupToScore, Score
from penstock.reward_service.errors import EndpointNonsense, NotAllowed, ScoreRefused
from penstock.serving import signature
from penstock.serving.hosting import Leases


def tripped(now: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(MIN_CALLS):
        breaker.record(now, failed=True)
    return breaker


def test_a_breaker_opens_only_when_most_of_enough_calls_failed() -> None:
    """Four failures do not open it, five do; a third of many calls does not."""
    breaker = Breaker()
    assert [breaker.record(0.0, failed=True) for _ in range(MIN_CALLS)] == [False] * (MIN_CALLS - 1) + [True]
    assert breaker.state(0.0) is BreakerState.OPEN
    assert not breaker.admit(0.5 * FIRST_PAUSE_S)
    mostly_good = Breaker()
    assert not any(mostly_good.record(0.0, failed=number % 3 == 2) for number in range(60))
    assert mostly_good.admit(0.0)


def test_a_half_open_breaker_lets_one_call_through() -> None:
    """After its pause one call is allowed; success closes it, failure doubles the pause up to a bound."""
    breaker = tripped()
    assert breaker.state(FIRST_PAUSE_S) is BreakerState.HALF_OPEN
    assert breaker.admit(FIRST_PAUSE_S)
    assert not breaker.admit(FIRST_PAUSE_S)
    breaker.withdraw()
    assert breaker.admit(FIRST_PAUSE_S), "a call that was not made after all frees the place"
    now = FIRST_PAUSE_S
    for _ in range(10):
        breaker.record(now, failed=True)
        assert breaker.state(now) is BreakerState.OPEN
        assert breaker.retry_in_s(now) <= LONGEST_PAUSE_S
        now += breaker.retry_in_s(now)
        assert breaker.admit(now)
    breaker.record(now, failed=False)
    assert breaker.state(now) is BreakerState.CLOSED
    assert breaker.retry_in_s(now) == 0.0


def test_answers_to_earlier_calls_do_not_change_an_open_breaker() -> None:
    """Answers of calls in progress when it opened neither close nor prolong it."""
    breaker = tripped()
    breaker.record(0.1, failed=False)
    assert breaker.state(0.2) is BreakerState.OPEN
    breaker.record(0.2, failed=True)
    assert breaker.state(FIRST_PAUSE_S) is BreakerState.HALF_OPEN


@given(st.floats(0.5, 100.0), st.lists(st.floats(0.0, 0.5), min_size=1, max_size=200))
def test_a_token_bucket_keeps_its_rate(rate: float, pauses: list[float]) -> None:
    """For any timing of calls, at most the rate plus one second's worth go through."""
    bucket, now, passed = TokenBucket(rate, 0.0), 0.0, 0
    for pause in pauses:
        now += pause
        passed += bucket.take(now) == 0.0
    assert passed <= max(1.0, rate) + rate * now + 1e-6
    wait = bucket.take(now)
    assert wait == 0.0 or bucket.take(now + wait + 1e-9) == 0.0


def test_a_signature_is_the_specifications_own() -> None:
    """The signature of the Standard Webhooks reference implementations is produced, with one key and with two."""
    secret, body = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", b'{"test": 2432232314}'
    given = {"message_id": "msg_p5jXN8AQM9LWM0D4loKWxJek", "timestamp": 1614265330, "body": body}
    expected = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert signature.headers([secret], **given) == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": expected,
    }
    other = signature.PREFIX + base64.b64encode(b"x" * 32).decode()
    both = signature.headers([other, secret], **given)["webhook-signature"].split()
    assert both[1] == expected
    assert both[0] != expected


@pytest.mark.parametrize("secret", ["", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_%%%", "whsec_c2hvcnQ="])
def test_an_invalid_signing_secret_is_refused_without_showing_it(secret: str) -> None:
    """The text says what a secret looks like, and does not repeat what was given."""
    with pytest.raises(ValueError, match="whsec_ and the base64 of 24 to 64") as err:
        Registration.model_validate({"name": "x", "url": "http://127.0.0.1/", "secrets": [secret]})
    assert not secret or f"input_value='{secret}" not in str(err.value)


def test_a_lease_expires_by_the_readers_clock() -> None:
    """A lease expires when its revision is unchanged for its duration; a new revision, or a first read, restarts it."""
    endpoint = Endpoint(name="x", url="http://127.0.0.1/", lease_s=5)
    leases = Leases()
    assert leases.expired_for_s(endpoint.lease_key, endpoint.lease_s, 1.0) > 0, "never seen"
    leases.saw({endpoint.lease_key: 3}, 10.0)
    leases.saw({endpoint.lease_key: 3}, 14.0)
    assert leases.expired_for_s(endpoint.lease_key, endpoint.lease_s, 14.0) == 0.0
    assert leases.expired_for_s(endpoint.lease_key, endpoint.lease_s, 16.0) == pytest.approx(1.0)
    leases.saw({endpoint.lease_key: 4}, 16.0)
    assert leases.expired_for_s(endpoint.lease_key, endpoint.lease_s, 20.0) == 0.0
    leases.saw({}, 20.0)
    assert leases.expired_for_s(endpoint.lease_key, endpoint.lease_s, 20.0) > 0, "taken away"
    assert leases.expired_for_s(endpoint.lease_key, None, 99.0) == 0.0
    assert endpoint.lease_key != endpoint.model_copy(update={"version": "2"}).lease_key


def test_tokens_have_names_and_roles() -> None:
    """A token allows the actions of its role; an unknown token none; without any tokens all actions are allowed."""
    lines = f"# ours\n\nann admin {'a' * 16}\n  bob register {'b' * 16}\neve READ {'c' * 16}\n"
    access = Access(read_tokens(lines))
    bob, ann = access.caller("b" * 16), access.caller("a" * 16)
    assert bob is not None
    assert ann is not None
    assert (bob.name, bob.role) == ("bob", Role.REGISTER)
    assert access.caller("b" * 15) is None
    assert access.caller(None) is None
    assert Access([]).caller(None) == ANONYMOUS
    hers = Endpoint(name="x", url="http://127.0.0.1/", owner="ann")
    ann.check_owns(hers)
    with pytest.raises(NotAllowed, match="belongs to 'ann', your token is 'bob'"):
        bob.check_owns(hers)
    bob.check_owns(hers.model_copy(update={"owner": "bob"}))


def test_a_hashed_token_lets_its_token_in_and_not_its_hash() -> None:
    """Whoever reads the file of tokens cannot use what is in it."""
    line = hashed("a" * 16)
    assert line == "sha256:0c0beacef8877bbf2416eb00f2b5dc96354e26dd1df5517320459b1236860f8c"  # sha256sum's
    access = Access(read_tokens(f"ann admin {line}"))
    caller = access.caller("a" * 16)
    assert caller is not None
    assert (caller.name, caller.role) == ("ann", Role.ADMIN)
    assert access.caller(line) is None
    assert access.caller(line.removeprefix("sha256:")) is None


A, B = "a" * 16, "b" * 16


@pytest.mark.parametrize(
    "line",
    ["ann admin", f"ann boss {A}", f"a/b read {A}", "ann admin short", f"a read {A}\na read {B}", f"a read sha256:{A}"],
)
def test_a_wrong_line_of_tokens_is_named_without_its_token(line: str) -> None:
    """The error has the number of the line and never the token."""
    with pytest.raises(ValueError, match="line ") as err:
        read_tokens(line)
    assert [token for token in (A, B) if token in str(err.value)] == []


def test_the_first_completion_without_a_valid_score_is_named() -> None:
    """A score out of its range counts against the endpoint, also where it refuses a later completion."""
    endpoint = Endpoint(name="x", url="http://127.0.0.1:1/", min_score=0, max_score=1)
    group = GroupToScore(group_id="g", completions=["a", "b"])
    beyond, refused = Score(score=5.0), Score(error="no")
    first = outcome(endpoint, group, [beyond, refused])
    assert (type(first), "completion 0: score 5 is outside [0, 1]" in str(first)) == (EndpointNonsense, True)
    assert isinstance(outcome(endpoint, group, [refused, beyond]), ScoreRefused)
