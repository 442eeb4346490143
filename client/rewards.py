"""The reward of a call: an endpoint, or a Python function that threads of this process serve over HTTP at a loopback port.

It is registered at the run's reward service as long as this process runs. A function may be a closure or of a notebook's
cell: it is never imported, copied or sent. HTTP and the renewal of the registration run in one thread, the function in
another, one call at a time; what it awaits overlaps. It does not run on the main thread, so that ``signal.alarm`` cannot
be used in it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import CodeType
from typing import Any
from urllib.parse import urlsplit

from penstock.protocol.errors import PenstockError
from penstock.protocol.transport import tls
from penstock.protocol.transport.loop_thread import LoopThread
from penstock.reward_service.hosting import served_reward
from penstock.reward_service.hosting.registration import Offer, RewardRegistration, ServiceAddress
from penstock.reward_service.hosting.served_reward import HostedFunction
from penstock.reward_service.user_code import user_file
from penstock.serving import web_server

_TIMEOUT_S = 300.0  # of one call of the reward service
_DEADLINE_S = 90.0  # of the function's setup, and of a stop
_STOP_S = 5.0
_HOST = "127.0.0.1"
_REGISTER_S = 90.0
_LEASE_S = 15.0  # a killed process is out of service after this time


class RegisteredReward:
    def __init__(self, name: str, url: str, version: str, terms: Mapping[str, Any] | None = None) -> None:
        """``version`` is stored with every group that it scored; ``terms`` are further fields of the registration."""
        self.name = name
        self._offer = Offer(name, url, version, lease_s=_LEASE_S, more=terms or {})
        self._thread: LoopThread | None = None

    @classmethod
    def of_url(cls, url: str) -> RegisteredReward:
        """Return the endpoint at a URL, with a name made of host and path."""
        parts = urlsplit(url)
        name = re.sub(r"[^A-Za-z0-9]+", "-", f"{parts.netloc.rpartition('@')[2]}{parts.path}").strip("-")[:100]
        return cls(name, url, "unknown")

    def register(self, service: str) -> None:
        """Register at a reward service and renew the lease from now on; raises NotRegistered."""
        self.close()
        self._thread = LoopThread("reward-lease")
        registration = RewardRegistration(ServiceAddress(service), self._offer)
        self._thread.start(registration.register()).result(_REGISTER_S)
        self._thread.start(registration.keep())

    def close(self) -> None:
        """Stop renewing: the reward is out of service when its lease has expired. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()


def reward_of(function: Callable[..., Any]) -> HostedFunction:
    """Return a function, callable object or class as a reward; raises UserFileError for one with no known signature."""
    code = _code(function)
    file = Path(code.co_filename) if code is not None else Path("<python>")
    name = getattr(function, "__name__", type(function).__name__)
    return HostedFunction(
        user_file.of(function, name, file, full_tracebacks=True), _version(function, code), {"timeout_s": _TIMEOUT_S}
    )


def reward_name(function: Callable[..., Any]) -> str:
    """Return the name under which a function is registered: the function's name, with what a name may have."""
    name = getattr(_innermost(function), "__name__", type(function).__name__)
    return re.sub(r"[^A-Za-z0-9_.-]", "", "reward" if name == "<lambda>" else name).lstrip("_.-") or "reward"


class ServedFunction:
    def __init__(self, reward: HostedFunction, name: str) -> None:
        """Start serving; raises UserFileError when the reward's ``setup`` fails, ConfigError without a free port."""
        self.name = name
        self._reward = reward
        self._registered: RegisteredReward | None = None
        self._calls_thread = LoopThread("reward-calls")
        self._http_thread = LoopThread("reward-http")
        self._bound = tls.listen(_HOST, 0, key="the port")
        try:
            _within(_DEADLINE_S, self._calls_thread.start(reward.open()))
        except BaseException:
            self._bound.close()
            self._end_threads()
            raise
        app = served_reward.build_app(reward, served_reward.Calls(self._calls_thread.loop), secrets=(), hosts=())
        self._serving = contextlib.AsyncExitStack()
        entering = self._serving.enter_async_context(web_server.serving(app, self._bound))
        _within(_DEADLINE_S, self._http_thread.start(entering))

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self._bound.getsockname()[1]}/score"

    def register(self, service: str) -> None:
        """Register at a reward service and renew the lease from now on; raises NotRegistered."""
        if self._registered is not None:
            self._registered.close()
        self._registered = RegisteredReward(self.name, self.url, self._reward.version, self._reward.terms)
        self._registered.register(service)

    def close(self) -> None:
        """Stop serving; calls in progress are abandoned. Idempotent."""
        if not self._http_thread.is_running:
            return
        if self._registered is not None:
            self._registered.close()
        _within(_DEADLINE_S, self._http_thread.start(self._serving.aclose()))
        with contextlib.suppress(TimeoutError):
            self._calls_thread.start(self._reward.close()).result(_STOP_S)
        self._bound.close()
        self._end_threads()

    def _end_threads(self) -> None:
        self._http_thread.stop()
        self._calls_thread.stop()


def _within(deadline_s: float, work: Future[Any]) -> None:
    try:
        work.result(deadline_s)
    except TimeoutError:
        if work.done():  # raised by the function
            raise
        work.cancel()
        raise PenstockError(
            f"the reward's thread did not answer within {deadline_s:.0f} s: a call of the function does not return"
        ) from None


def _innermost(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _code(function: Any) -> CodeType | None:
    """Return the code object of what is called; None for one that is not written in Python."""
    callee = inspect.unwrap(_innermost(function))
    if not inspect.isroutine(callee):
        callee = inspect.getattr_static(callee if inspect.isclass(callee) else type(callee), "__call__", None)
    callee = getattr(callee, "__func__", callee)
    return getattr(callee, "__code__", None)


def _version(function: Any, code: CodeType | None) -> str:
    """Return a hash of the source; where Python does not have it, of the compiled code."""
    try:
        target = inspect.unwrap(_innermost(function))
        source = inspect.getsource(target if inspect.isroutine(target) or inspect.isclass(target) else type(target))
    except (OSError, TypeError):
        source = "" if code is None else _text_of(code)
    return hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()[:8]


def _text_of(code: CodeType) -> str:
    """Return what a function does as a text, without the place of its source."""
    constants = [
        _text_of(co_const) if isinstance(co_const, CodeType) else repr(co_const) for co_const in code.co_consts
    ]
    return " ".join([code.co_code.hex(), *code.co_names, *constants])
