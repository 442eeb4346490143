"""The keys of requests to the object store: of the settings and their files, or of the machine's role; read again after a refusal."""

from __future__ import annotations

import threading

import urllib3
from minio.credentials import AWSConfigProvider, Credentials, EnvAWSProvider, IamAwsProvider, Provider

from penstock.protocol.config.connection import S3Settings
from penstock.protocol.errors import ConfigError

_ROLE_S = 5.0  # for one answer of the server that gives a role's keys


class NoLogin(OSError):
    """No keys can be had now: a file is being replaced, or the server of the machine's role does not answer."""


def has_login(settings: S3Settings) -> bool:
    """Return True unless requests are sent without a signature. Raises ConfigError for a file that is not readable."""
    return settings.credentials == "aws" or _has_file(settings) or any(settings.keys())


class Login(Provider):
    """The present keys. Thread-safe; `refused` has them read again for the next request."""

    def __init__(self, settings: S3Settings) -> None:
        """Raises ConfigError for a file of the settings that is not readable."""
        self._settings = settings
        self._lock = threading.Lock()
        self._keys: Credentials | None = None
        self._access_key = ""
        if settings.credentials == "keys" and (all(settings.keys()[:2]) or not _has_file(settings)):
            self._keys = _of_settings(settings)  # a file that is empty is read again with each request

    def retrieve(self) -> Credentials:
        with self._lock:
            if self._keys is None or self._keys.is_expired():
                try:
                    self._keys = _of_settings(self._settings) if self._settings.credentials == "keys" else _of_machine()
                except ConfigError as err:
                    raise NoLogin(str(err)) from None
            self._access_key = self._keys.access_key
            return self._keys

    @property
    def access_key(self) -> str:
        """The access key of the last request."""
        return self._access_key

    def refused(self) -> None:
        with self._lock:
            self._keys = None


def _has_file(settings: S3Settings) -> bool:
    return any((settings.access_key_file, settings.secret_key_file, settings.session_token_file))


def _of_settings(settings: S3Settings) -> Credentials:
    access_key, secret_key, token = settings.keys()
    try:
        return Credentials(access_key, secret_key, token or None)
    except ValueError as err:
        raise ConfigError(f"s3.access_key and s3.secret_key belong together: {err}") from None


def _of_machine() -> Credentials:
    """Return the keys that AWS's own tools would use: of the environment, the file of credentials, or a role (IRSA, ECS, EC2)."""
    problems: list[str] = []
    pool = urllib3.PoolManager(timeout=urllib3.Timeout(_ROLE_S), retries=False)
    for kind in (EnvAWSProvider, AWSConfigProvider, lambda: IamAwsProvider(http_client=pool)):
        try:
            return kind().retrieve()
        except Exception as err:  # noqa: BLE001  minio lets every error of files, JSON and XML pass
            problems.append(f"{type(err).__name__}: {str(err)[:200]}")
    raise NoLogin(f"s3.credentials = 'aws', and this machine has none: {'; '.join(problems)}")
