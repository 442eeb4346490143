"""Requests that the proxy does not answer, each with its HTTP status; the API of the request writes the body."""

from __future__ import annotations

from penstock.protocol.errors import PenstockError


class RequestRefused(PenstockError):
    """A request cannot be answered; ``code`` is one word for programs, the text a sentence for people."""

    def __init__(self, status: int, code: str, message: str, *, param: str | None = None) -> None:
        """``param`` names the field of the body at fault."""
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


def invalid(message: str, param: str | None = None, *, code: str = "invalid_request") -> RequestRefused:
    """Return the error for a body that is not as the API has it."""
    return RequestRefused(400, code, message, param=param)


def unsupported(what: str, param: str) -> RequestRefused:
    """Return the error for a field that asks for what the proxy does not do."""
    return RequestRefused(400, "unsupported", f"{what} is not supported: leave out {param}", param=param)


def constrained(param: str) -> RequestRefused:
    """Return the error for a field that would constrain decoding."""
    return RequestRefused(
        400,
        "constrained_decoding",
        f"{param} constrains decoding: the log-probabilities would be of another distribution than the trained one; leave it out, "
        "and let the reward judge the form",
        param=param,
    )
