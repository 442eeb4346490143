"""The one rule for what is secret in settings and texts, and how an option gets a secret that no run file holds.

A value is secret when its field says so (``repr=False``), by the name of its key, when it belongs to a table of
variables or headers, when a part of it has the form of a known credential, or when this process read it from a file or
variable of secrets. Settings pass `hide` and texts `scrub` wherever they are shown: pages, logs, tracebacks.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

from penstock.protocol.errors import ConfigError

MASK = "********"
FROM_ENVIRONMENT = "env:"
_FILE = "_file"
_LEAST_CHARS = 8  # of a value that is searched for in texts: shorter ones are in ordinary words

# The last word of a name; and what a name that a user chose follows.
_TABLES = frozenset({"variables", "vars", "env", "environ", "envs", "header", "headers", "cookies"})
_NAMES_OF_USERS = frozenset({"define", "parts", "by_source", "properties", "roles"})
_ASSIGNED = re.compile(r"([\w.-]{1,99}\s{0,3}[:=]\s{0,3})(.+)", re.DOTALL)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET_WORDS = frozenset({
    "secret", "password", "passwd", "passphrase", "pwd", "credential", "apikey", "bearer", "authorization", "authtoken",
    "cookie", "dsn", "pat", "privatekey", "accesstoken", "jwt", "pw", "otp",
})  # fmt: skip
_SECRET_ENDS = ("password", "passwd", "passphrase", "apikey", "authkey")  # PGPASSWORD
_LAST_WORDS = frozenset({"token", "pass", "auth", "key"})
_IN_PROSE = (["token"], ["auth"], ["pass"], ["pat"])  # NAME=value in code and sentences, such as token=A
_IN_QUERIES = frozenset({"key", "code", "sig", "signature", "token", "auth", "pass"})
_KINDS_OF_KEYS = frozenset({
    "api", "private", "secret", "signing", "encryption", "auth", "account", "service", "license", "master", "shared",
    "subscription",
})  # fmt: skip
_NO_VALUE = frozenset({"file", "path", "url", "type", "name", "id", "ids", "size", "mode", "format", "count", "policy"})
_KINDS_OF_TOKENS = frozenset({  # of a text or a table, before token, pass or key: no credential
    "stop", "eos", "bos", "pad", "unk", "mask", "sep", "cls", "special", "control", "added", "extra", "max", "min",
    "num", "image", "video", "new", "audio", "prompt", "completion", "think", "thinking", "begin", "end", "start",
    "first", "last", "next", "bad", "forced", "suppress", "per", "by", "primary", "foreign", "sort", "group",
    "partition", "cache", "join", "index", "answer", "row", "column",
})  # fmt: skip
_MODES = frozenset({
    "auto", "none", "null", "nil", "true", "false", "yes", "no", "on", "off", "all", "any", "required", "optional",
    "missing", "invalid", "empty", "unset", "undefined", "default", "basic", "bearer", "digest", "oauth", "oauth2",
    "aws", "keys", "iam", "sso", "keep", "env", "file", "see", "is", "the", "header", "headers", "str", "int", "id",
    "...",
})  # fmt: skip
_NO_SECRET = re.compile(
    r"[<\[|{(].*|\$[A-Z{(].*|%[s({].*|[#*]+|-?\d{1,5}(?:\.\d*)?|os\.(?:environ|getenv).*", re.DOTALL
)
_RUN = (  # of the alphabet of random values, without the separators of names
    r"(?:(?=[a-z0-9]*[A-Z])(?=[A-Z0-9]*[a-z])[A-Za-z0-9]{20}|[0-9a-f]{20}|(?=[a-z]*\d)[a-z0-9]{30}|(?=[A-Z]*\d)[A-Z0-9]{30})"
)
_RANDOM = re.compile(r"(?=\S*\d)(?=\S*[A-Za-z])(?![a-z]{3,}/)\S{12,}")  # no path: key=runs/a/1
_LOOKS_RANDOM = re.compile(rf"(?=.*\d)[\w+/=.~-]*?{_RUN}[\w+/=.~-]*")
_PLAIN = re.compile(  # single words, paths, numbers, URLs and names of hosts, models and images
    r"[A-Za-z]?[a-z_-]{0,15}|[A-Z_-]{1,15}|[\d.,:-]+|(?:[~.]{0,2}/[a-z][\w.-]*)+/?|\w+://[^\s@?]+"
)

_FORMS = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----(?:.*?-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----|.*)"
    # at the start of a word, also after an escape such as \n and %20, and after a colour
    r"|(?:(?<![A-Za-z0-9_-])|(?<=\\[nrt])|(?<=%[0-9A-F]{2})|(?<=\\u00[0-9a-f]{2})|(?<=\[\dm)|(?<=\[\d\dm))(?=[A-Zabcdefghjklmnoprstvwxyz0-9])(?:"
    r"(?:sk|rk|pk|whsec)_(?:live|test)_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
    r"|glpat-[\w-]{16,}|gl(?:dt|rt|cbt|ptt|ft|soat)-[\w-]{16,}|(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{12,}|hf_[A-Za-z0-9]{30,}"
    r"|xox[a-z](?:\.xox[a-z])?-\d[\w-]{8,}|xapp-\d[\w-]{8,}|npm_[A-Za-z0-9]{30,}|dckr_(?:pat|oat)_[\w-]{20,}"
    r"|eyJ[\w-]{5,}\.[\w-]{0,999}\.[\w-]*(?:\.[\w-]*){0,2}|AIza[\w-]{20,}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,}|SG\.[\w-]{16,}\.[\w-]{16,}"
    r"|(?:ntn|lin_api|glsa|figd|e2b)_(?=[A-Za-z]*\d)[A-Za-z0-9]{16,}(?:_[0-9a-f]{8})?"
    rf"|(?:sk|rk|pk|whsec|pypi|nvapi|gsk|r8|hf|pplx|xai|tvly|fw|dop_v1|hvs|hvb|lsv2_pt|lsv2_sk|wandb_v1|csk|together"
    rf"|jina|key|tgp_v1|dapi|shp(?:at|ca|ss|pa)|sbp|atp|glc|rpa|fc|vcp|exa|bb_live|api_org|PMAK|sntry[su]|rubygems|pscale_(?:tkn|pw|oauth)"
    rf"|tskey-(?:auth|api|client)|do[or]_v1|dp[._](?:pt|st|ct|sa)|rdme|pul|ph[cx]|NRAK|NRJS|lin_oauth|nfp|vercel_blob_rw|sgp|tfp|EZ[AT]K|HRKU"
    rf"|sq0(?:atp|csp)|xoxe|cfut|secret|tok|pat|fo1|fm[12]|zpka|ctx7sk|cpk|pcsk|bkua|CCIPAT|ops|pnu|dtn|pit|sb_secret|npg|as|ak|pa)[-_.]"
    rf"(?:(?=[\w-]{{0,60}}?(?<![A-Za-z0-9]){_RUN})|(?=[\w-]*[A-Z])(?=[\w-]*\d)(?=[\w-]*[a-z])(?=[\w-]{{48}}))[\w-]+(?:\.[\w-]{{16,}})?"
    r"|dapi[0-9a-f]{32}|AT(?:ATT|CTT|BB)[\w=-]{20,}|S[AUNOC][A-Z2-7]{40,}|AGE-SECRET-KEY-1[A-Z0-9]{10,}|SK[0-9a-f]{32}|pat[A-Za-z0-9]{14}\.[0-9a-f]{64}"
    r"|AKCp[A-Za-z0-9]{60,}|cmVmdGtu[A-Za-z0-9]{50,}|GOOG1E[A-Z0-9]{50,}|1//0[\w-]{40,}|EAAA[\w-]{50,}|\w{3}8Q~[\w~.-]{31,}"
    r"|(?:bot)?\d{8,10}:AA[\w-]{30,})|(?:(?<=hooks\.slack\.com/services/)|(?<=hooks\.slack\.com/workflows/)"
    r"|(?<=hooks\.slack\.com/triggers/)|(?<=discord\.com/api/webhooks/)|(?<=discordapp\.com/api/webhooks/))\S+",
    re.DOTALL,
)
_IN_URL = re.compile(r"(://[^\s/?#@:\"']{0,300}:)[^\s/?#\"']{1,300}(?=@)")
_AS_USER = re.compile(  # https://TOKEN@host, and user:password@host without a scheme
    r"(://)(?=[A-Za-z_-]*\d)(?=[\d_-]*[A-Za-z])[\w-]{8,300}(?=@)"
    r"|((?<![\w:])[A-Za-z]\w{0,63}:)(?=[^\s@]{0,99}[A-Z])(?=[^\s@]{0,99}[a-z])(?=[^\s@]{0,99}\d)"
    r"[\w+/=!$%^*?#']{8,300}(?=@(?!sha256))"
)
_ADDRESSES = frozenset({"url", "urls", "endpoint", "address"})
_LOGIN = re.compile(r"[^\s/,@]+@")
_AFTER_NAME = re.compile(  # of a header or an option
    r"((?:authorization|x-api-key|api-key)[\"']?\s{0,9}[:=]\s{0,9}[\"']?(?:(?:bearer|basic|token|[a-z][\w-]{2,30}(?=\s{1,9}[^\s\"',;]{0,99}\d))\s{1,9})?)"
    r"([^\s\"',;]+)|(bearer\s{1,9})((?=\S{0,99}\d)[\w.~+/=-]{12,})"
    r"|(\b(?:basic|negotiate)\s{1,9})((?-i:(?=\w{0,99}[A-Z])(?=\w{0,99}[a-z])(?=\w{0,99}\d)[A-Za-z0-9+/=]{12,}))"
    r"|(--[\w-]{0,30}(?:token|password|passwd|passphrase|secret|api[-_]?key)\s{1,3})((?=\S{0,99}\d)[^\s\"',;]{8,})"
    # curl -u me:X, sshpass -p X, docker login -p X, and a line of .netrc
    r"|(\b(?:curl|wget|http)\s[^\n|]{0,200}?-(?:u|-user)[\s=]{0,3}[\"']?[^\s:]{1,64}:)([^\s\"']+)"
    r"|(\b(?:sshpass|(?:docker|podman|helm registry|az|mysql)\s[^\n|]{0,200}?)\s-p\s{0,3}[\"']?)((?=[^\s:]{0,99}\D)[^\s\"':]{6,}(?=[\s\"']|$))"
    r"|(\blogin\s{1,9}\S{1,99}\s{1,9}password\s{1,9})(\S+)|(\bcookie[\"']?:\s{0,3}[\"']?)([^\s=;]{1,99}=[^\n\"']+)",
    re.IGNORECASE,
)
_TAG = re.compile(r"<([A-Za-z][\w.:-]{0,63})>([^<>]{1,300})(?=</\1>)")
_SEPARATOR = r"(?:\\{0,3}[\"'])?\]?\s{0,3}(?::|=>?|->)\s{0,3}(?:[|>][+-]?\s{1,20}|-\s)?"
_PAIR = re.compile(  # NAME=value; and NAME: value, with quotes as in JSON, TOML, argv and repr, or with a digit and a letter
    r"(?:(?<![\w\\-])|(?<=\\\\)|(?<=\\)(?![nrt])|(?<=(?<!\\)\\[nrt])|(?<=%[0-9A-F]{2})|(?<=\[\dm)|(?<=\[\d\dm))"
    r"(?P<name>(?:(?i:api|secret|access|private|auth)\s)?[A-Za-z_-][\w-]{0,63})(?:"
    rf"{_SEPARATOR}\\{{0,3}}[bru]?(?:\"{{3}}|[\"'])(?P<quoted>(?:[^\"'\n\\]|\\(?![\"'])){{1,300}})"
    r"|(?:=(?!>)|%3D)(?P<value>\w{1,20}://[^\s&\"',;?#]{1,300}(?=[?#])|[^\s&\"',;]{1,300})"
    r"|[\"'],\s?[\"'](?P<next>(?=[^\"']{0,99}\d)[^\"'\n]{4,300})"
    rf"|{_SEPARATOR}(?:(?P<random>(?=[^\s:]{{0,99}}\d)[\w+/=.~-]{{0,99}}?{_RUN}[\w+/=.~-]*)"
    r"|(?P<plain>(?=\S{0,99}\d)(?=\S{0,99}[A-Za-z]|\d{6})[^\s\"',;<>(){}\[\]]{6,300}+(?!\())))"
)
_REST = re.compile(r"[^\s&\"',;]*")  # of a long value
_FLAG = re.compile(r"--?([A-Za-z][\w-]*)")
_known: set[str] = set()


def remember(value: str) -> str:
    """Return a secret read from a file or a variable; from now on `scrub` hides it in all texts of this process.

    Not searched for are short values, and words, paths and URLs, which are in ordinary texts.
    """
    if len(value) >= _LEAST_CHARS and not value.startswith(FROM_ENVIRONMENT) and _PLAIN.fullmatch(value) is None:
        _known.update(_spellings(value))
    return value


def _spellings(value: str) -> set[str]:
    """Return a value as it is in texts, URLs, JSON and ``repr``, and in a base64 text such as of ``user:value``."""
    raw = value.encode()
    encoded = {base64.b64encode(b"\0" * skipped + raw)[(skipped * 8 + 5) // 6 :].decode() for skipped in range(3)}
    inner = {text.rstrip("=")[: -1 if text.endswith("=") else None] for text in encoded}
    quoted = {quote(value), quote(value, safe=""), quote_plus(value), json.dumps(value)[1:-1], repr(value)[1:-1]}
    return {value, *quoted, *inner}


def scrub(text: str) -> str:
    """Return a text without what is known as secret or has the form of a credential."""
    for value in sorted(_known, key=len, reverse=True):
        text = text.replace(value, MASK)
    text = _FORMS.sub(MASK, text)
    text = _IN_URL.sub(rf"\1{MASK}", text)
    text = _AS_USER.sub(lambda match: (match[1] or match[2]) + MASK, text)
    text = _TAG.sub(lambda tag: f"<{tag[1]}>{MASK}" if _is_secret_name(tag[1], tag[2]) else tag[0], text)
    text = _AFTER_NAME.sub(_without_operand, text)
    shown, done, at = "", 0, 0
    while match := _PAIR.search(text, at):
        at, end = match.span(match.lastgroup or "value")
        if _is_secret_pair(match):
            shown += text[done:at] + MASK
            done = at = _REST.match(text, end).end() if match["value"] else end  # pyright: ignore[reportOptionalMemberAccess] - it matches anything
    return shown + text[done:]


def _without_operand(match: re.Match[str]) -> str:
    name, value = (group for group in match.groups() if group is not None)
    return match[0] if _is_harmless(value) else name + MASK


def _is_secret_pair(match: re.Match[str]) -> bool:
    name, value = match["name"], match[match.lastgroup or "value"]
    words = _words(name)
    if _is_harmless(value) or (words == ["pwd"] and value.startswith(("/", "~"))):  # PWD: the shell's folder
        return False
    in_query = match.string[match.start() - 1 : match.start()] in ("?", "&") or words[-1:] == ["signature"]
    if in_query and _IN_QUERIES.intersection(words[-1:]):
        return True
    is_kind = len(words) > 1 and (words[-1] in _LAST_WORDS - {"key"} or not _KINDS_OF_KEYS.isdisjoint(words))
    if (match["plain"] or match["next"]) and not (
        (is_kind and not match["next"])
        or name.startswith("-")
        or _SECRET_WORDS.intersection(words)
        or "".join(words[-1:]).endswith(_SECRET_ENDS)
    ):
        return False
    is_word = not in_query and words in _IN_PROSE and not name.startswith("-")
    if is_word and not (len(value) >= _LEAST_CHARS and any(char.isdigit() for char in value)):
        return False
    return _is_secret_name(name, value)


def hide(path: Sequence[str], value: Any, *, with_texts: bool = True) -> Any:
    """Return a value of settings as it may be shown: secret texts as the mask. ``path`` are the keys that lead to it.

    Without ``with_texts``, texts stay unless a name or a table says that they are secret.
    """
    if isinstance(value, Mapping):
        return {name: hide((*path, str(name)), item, with_texts=with_texts) for name, item in value.items()}
    in_table = any(_is_table(path, place) for place in range(len(path) - 1))
    if isinstance(value, list | tuple):
        is_table = bool(path) and _is_table(path, len(path) - 1)
        flags = ["", *(item if isinstance(item, str) else "" for item in value)]
        if is_table and len(value) and all(isinstance(item, list | tuple) and len(item) == 2 for item in value):
            return [[name, hide((*path, str(name)), item, with_texts=with_texts)] for name, item in value]
        return [
            _argument(flag, item)
            if isinstance(item, str) and _follows(flag, item)
            else hide(path, item, with_texts=with_texts)
            for flag, item in zip(flags, value, strict=False)
        ]
    if not isinstance(value, str) or not value or _is_reference(value):
        return value
    if in_table:  # X_file names the file of the variable X
        return value if path[-1].endswith(_FILE) and _LOOKS_RANDOM.fullmatch(value) is None else MASK
    if (
        path and _is_table(path, len(path) - 1) and (assigned := _ASSIGNED.fullmatch(value))
    ):  # ["NAME=value", "Name: value"]
        return value if _is_reference(assigned[2]) else assigned[1] + MASK
    if path and not _ADDRESSES.isdisjoint(_words(path[-1])[-1:]):  # what is before @ there is a login, however short
        value = _LOGIN.sub(f"{MASK}@", value)
    is_secret = any(_is_secret_name(part, value) for part in _names(path))
    return MASK if is_secret else scrub(value) if with_texts else value


def _names(path: Sequence[str]) -> list[str]:
    """Return the keys of a path that a schema names: the key of a definition is a name that a user chose."""
    return [part for before, part in zip(("", *path), path, strict=False) if before not in _NAMES_OF_USERS]


def _is_table(path: Sequence[str], place: int) -> bool:
    if place and path[place - 1] in _NAMES_OF_USERS:
        return False
    words = _words(path[place])
    return (words[-1:] == ["environment"] and place > 1) or not _TABLES.isdisjoint(words[-1:])


def _follows(flag: str, value: str) -> bool:
    match = _FLAG.fullmatch(flag)
    if match is None or value.startswith("-") or _is_reference(value):
        return False
    if match[1] in ("H", "header", "e", "env", "u", "user"):
        return ":" in value or "=" in value
    return _is_secret_name(match[1], value)


def _argument(flag: str, value: str) -> str:
    assigned = _ASSIGNED.fullmatch(value) if flag.lstrip("-") in ("H", "header", "e", "env", "u", "user") else None
    return assigned[1] + MASK if assigned else MASK


def _is_reference(value: str) -> bool:
    return re.fullmatch(rf"{FROM_ENVIRONMENT}[A-Za-z_][A-Za-z0-9_]*", value) is not None


def _is_harmless(value: str) -> bool:
    """Return True for the values that code, documentation and choices have in place of a secret."""
    return value.rstrip(")].:").lower() in _MODES or _NO_SECRET.fullmatch(value.rstrip(")].:")) is not None


def _words(name: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(name)]


def _is_secret_name(name: str, value: str) -> bool:
    words = _words(name)
    if not words or value.lower() in _MODES:
        return False
    is_plural = words[-1].endswith("s") and words[-1][:-1] in _LAST_WORDS and words[-1] != "pass"
    words = [
        word[:-1] if word[:-1] in _SECRET_WORDS | _LAST_WORDS | _NO_VALUE and word.endswith("s") else word
        for word in words
    ]
    if words[-1] in _NO_VALUE or _KINDS_OF_TOKENS.intersection(words[:-1]):
        return False
    if _SECRET_WORDS.intersection(words) or "".join(words) in _SECRET_WORDS or words[-1].endswith(_SECRET_ENDS):
        return True
    if _is_harmless(value):
        return False
    if words[-1] == "key":
        return (
            bool(_KINDS_OF_KEYS.intersection(words))
            or (name.isupper() and not is_plural)
            or _RANDOM.fullmatch(value) is not None
        )
    return words[-1] in _LAST_WORDS


def resolved(
    options: Mapping[str, Any], key: str, environ: Mapping[str, str], fields: Sequence[str] = ()
) -> dict[str, Any]:
    """Return options with the secrets they name: ``"env:NAME"`` as that variable, ``X_file`` of X as the file's text.

    A file stands for X in a table of variables or headers, and where X is among the ``fields`` of the options and
    ``X_file`` is not. Raises ConfigError, naming the option below ``key``, for an unset variable or unreadable file.
    """
    values: dict[str, Any] = {}
    in_table = _is_table(key.split("."), key.count("."))
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
        secret = environ[variable]
        names = (*_names(key.split(".")), variable)
        is_secret = (
            any(_is_secret_name(name, secret) for name in names)
            or _LOOKS_RANDOM.fullmatch(secret)
            or scrub(secret) != secret
        )
        return remember(secret) if is_secret else secret
    return value


def secret_file(file: Path, key: str) -> str:
    """Return the secret in the file of the setting ``key``; raises ConfigError if it is unreadable."""
    return remember(content_of(file, key))


def content_of(file: Path, key: str) -> str:
    """Return the content of the file of the setting ``key``; raises ConfigError if it is unreadable."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"{key} = {file}: not readable ({getattr(err, 'strerror', None) or 'not UTF-8'})") from None
