"""The one rule for what is secret in settings and texts, and how an option gets a secret that no run file holds.

A value is secret when its field says so (``repr=False``), by the name of its key, when it belongs to a table of variables or headers,
when a part of it has the form of a known credential, or when this process read it from a file or variable of secrets. Settings pass
`hide` and texts `scrub` wherever they leave a process: `config show`, the Runs API, records, cards, reports, trackers, logs and
tracebacks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.protocol.errors import ConfigError

MASK = "********"
FROM_ENVIRONMENT = "env:"
_FILE = "_file"
_LEAST_CHARS = 6  # of a value that is searched for in texts: shorter ones are in ordinary words

_TABLES = frozenset({"variables", "env", "environ", "envs", "headers", "extra_headers", "default_headers", "cookies"})
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET_WORDS = frozenset({
    "secret", "secrets", "password", "passwd", "passphrase", "pwd", "credential", "credentials", "apikey", "bearer", "authorization",
    "authtoken", "cookie", "dsn", "pat", "privatekey", "accesstoken",
})  # fmt: skip
_LAST_WORDS = frozenset({"token", "pass", "auth", "key"})
_KINDS_OF_KEYS = frozenset(
    {"api", "private", "secret", "signing", "encryption", "auth", "account", "service", "license", "master", "shared"}
)
_NO_VALUE = frozenset(
    {"file", "path", "url", "type", "name", "names", "id", "ids", "size", "mode", "format"}
)  # last words
_SPECIAL_TOKEN = re.compile(r"[<\[|{].*|auto|none|true|false", re.IGNORECASE | re.DOTALL)
_RANDOM = re.compile(r"(?=\S*\d)(?=\S*[A-Za-z])\S{12,}")

_FORMS = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----(?:.*?-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|.*)"
    r"|(?<![A-Za-z0-9_-])(?=[A-Zadeghjklnprstwxy0-9])(?:"
    r"sk-[A-Za-z0-9_-]{8,}|(?:sk|rk|pk|whsec)_(?:live_|test_)?[A-Za-z0-9]{16,}"
    r"|gh[pousr]_[A-Za-z0-9]{10,}|github_pat_\w{10,}|glpat-[\w-]{10,}|gl(?:dt|rt|cbt|ptt|ft|soat)-[\w-]{10,}"
    r"|(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{12,}|hf_(?=\w*[0-9A-Z])[A-Za-z0-9]{10,}|xox[a-z]-[\w-]{8,}|xapp-[\w-]{8,}"
    r"|eyJ[\w-]{5,}\.[\w-]{4,}\.[\w-]*|AIza[\w-]{20,}|ya29\.[\w-]{10,}|GOCSPX-[\w-]{10,}|SG\.[\w-]{8,}\.[\w-]{8,}"
    r"|npm_[A-Za-z0-9]{16,}|pypi-[\w-]{16,}|dckr_(?:pat|oat)_[\w-]{10,}|nvapi-[\w-]{10,}|gsk_[A-Za-z0-9]{10,}|r8_[A-Za-z0-9]{10,}"
    r"|(?:pplx|xai|tvly|fw|dop_v1|hvs|hvb|lsv2_pt|lsv2_sk|wandb_v1|csk|together|jina|key|tgp_v1|dapi|shpat|sbp|atp)[-_.]"
    r"(?=[\w-]*\d)[\w-]{16,}|tvly-[\w-]{8,}|S[AUNOC][A-Z2-7]{40,}|AGE-SECRET-KEY-1[A-Z0-9]{10,}|SK[0-9a-f]{32}"
    r"|\d{8,10}:AA[\w-]{30,})"
    r"|(?<=hooks\.slack\.com/services/)\S+|(?<=discord\.com/api/webhooks/)\S+",
    re.DOTALL,
)
_IN_CONTEXT = re.compile(  # group 1 stays, what follows is hidden; every alternative begins with a letter of its own: texts may be long
    r"(:(?://)?)[^\s/?#@:\"']{1,300}(?=@)"
    r"|((?:authorization|x-api-key|api-key)[\"']?\s{0,9}[:=]\s{0,9}[\"']?(?:(?:bearer|basic|token)\s{1,9})?)[^\s\"',;]+"
    r"|(bearer\s{1,9})(?=\S{0,99}\d)[\w.~+/=-]{8,}"
    r"|((?:password|passwd|passphrase|secret|(?:api|access|account)[-_]?key|(?:auth|access)[-_]?token|signature|(?<![a-z])(?:token|sig))=)"
    r"[^\s&\"',;]+"
    r"|((?-i:(?<=[A-Z0-9])_(?:TOKEN|KEY|PASS|PWD|PAT))=)[^\s&\"',;]+",
    re.IGNORECASE,
)
_FLAG = re.compile(r"--?[\w-]*(?:password|passwd|passphrase|secret|token|api[-_]?key|auth|credentials?)", re.IGNORECASE)
_known: set[str] = set()


def remember(value: str) -> str:
    """Return a secret that was read from a file or a variable; from now on `scrub` hides it in every text of this process."""
    if len(value) >= _LEAST_CHARS and not value.startswith(FROM_ENVIRONMENT):
        _known.add(value)
    return value


def scrub(text: str) -> str:
    """Return a text without what is known as secret or has the form of a credential."""
    for value in _known:
        text = text.replace(value, MASK)
    text = _FORMS.sub(MASK, text)
    return _IN_CONTEXT.sub(lambda match: next(part for part in match.groups() if part is not None) + MASK, text)


def hide(path: Sequence[str], value: Any) -> Any:
    """Return a value of settings as it may be shown: secret texts as the mask. ``path`` are the keys that lead to it."""
    if isinstance(value, Mapping):
        return {name: hide((*path, str(name)), item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        flagged = [False, *(isinstance(item, str) and _FLAG.fullmatch(item) is not None for item in value)]
        return [
            MASK if is_flagged and isinstance(item, str) else hide(path, item)
            for is_flagged, item in zip(flagged, value, strict=False)
        ]
    if not isinstance(value, str) or not value or _is_reference(value):
        return value
    in_table = any(part.lower().replace("-", "_") in _TABLES for part in path[:-1]) and not path[-1].endswith(_FILE)
    return MASK if in_table or _is_secret_name(path[-1] if path else "", value) else scrub(value)


def _is_reference(value: str) -> bool:
    return re.fullmatch(rf"{FROM_ENVIRONMENT}[A-Za-z_][A-Za-z0-9_]*", value) is not None


def _is_secret_name(name: str, value: str) -> bool:
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or words[-1] in _NO_VALUE:
        return False
    if _SECRET_WORDS.intersection(words) or "".join(words) in _SECRET_WORDS:
        return True
    if words[-1] not in _LAST_WORDS:
        return False
    if words[-1] == "key":
        return bool(_KINDS_OF_KEYS.intersection(words)) or name.isupper() or _RANDOM.fullmatch(value) is not None
    return _SPECIAL_TOKEN.fullmatch(value) is None


def resolved(
    options: Mapping[str, Any], key: str, environ: Mapping[str, str], fields: Sequence[str] = ()
) -> dict[str, Any]:
    """Return options with the secrets that they name: ``"env:NAME"`` as that variable, ``X_file`` of X as the file's content.

    A file stands for X in a table of variables or headers, and where X is among the ``fields`` of the options and ``X_file`` is not.
    Raises ConfigError, which names the option below ``key``, for a variable that is not set and a file that cannot be read.
    """
    values: dict[str, Any] = {}
    in_table = key.rpartition(".")[2].lower() in _TABLES
    for name, value in options.items():
        target = name.removesuffix(_FILE)
        if name != target and isinstance(value, str) and (in_table or (target in fields and name not in fields)):
            if target in options:
                raise ConfigError(f"{key}: {target} and {name} are both given; leave one out")
            values[target] = secret_file(Path(value), f"{key}.{name}")
        else:
            values[name] = _resolved_value(value, f"{key}.{name}", environ)
    return values


def _resolved_value(value: Any, key: str, environ: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        return resolved(value, key, environ)
    if isinstance(value, list):
        return [_resolved_value(item, key, environ) for item in value]
    if isinstance(value, str) and _is_reference(value):
        variable = value.removeprefix(FROM_ENVIRONMENT)
        if variable not in environ:
            raise ConfigError(f"{key} = {value}: the variable {variable} is not set where this process runs; export it")
        return remember(environ[variable])
    return value


def secret_file(file: Path, key: str) -> str:
    """Return the content of the file of the setting ``key``; raises ConfigError if it is unreadable."""
    try:
        return remember(file.read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"{key} = {file}: not readable ({getattr(err, 'strerror', None) or 'not UTF-8'})") from None
