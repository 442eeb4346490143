"""Settings that all services share: the run, and the connections to NATS and S3."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from penstock.protocol.errors import ConfigError
from penstock.protocol.secret_values import content_of, hide, remember, secret_file
from penstock.protocol.subjects import check_run_id

_TLS = "tls://"


class Section(BaseModel):
    """Base of every section of a run file: frozen, unknown keys refused, fields documented."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Yield the fields that pydantic prints, in errors too, without secrets."""
        for name, value in super().__repr_args__():
            yield name, hide((name or "",), value)


class RunSettings(Section):
    """The run's name, seed, and folder on this machine."""

    id: str = Field(default="run", description="Name of the run in subjects, object keys and folders: a-z, 0-9, '-'.")
    dir: Path = Field(
        default=Path("runs"), description="Parent folder of all runs; each run uses the sub-folder named by its id."
    )
    seed: int = Field(
        default=0,
        ge=0,
        description="Seed of the order of the prompts and examples, of a batch's mini-batches, of adapters' first "
        "values, of dropout, and of every sampled completion and episode: a run is repeated bit for bit where its "
        "engine is deterministic (docs/hyperparameters.md#seeds).",
    )

    @field_validator("id")
    @classmethod
    def _valid_id(cls, value: str) -> str:
        try:
            return check_run_id(value)
        except ConfigError as err:
            raise ValueError(str(err)) from None

    @property
    def folder(self) -> Path:
        return self.dir / self.id


class NatsSettings(Section):
    """The NATS server and the credentials for it."""

    url: str = Field(
        default="nats://127.0.0.1:4222",
        description="URL of the NATS server; of a cluster several, with commas between them: a client uses any that "
        "answers.",
    )
    user: str = Field(default="", description="User name; empty for a server without accounts.")
    password: str = Field(default="", description="Password; prefer password_file.", repr=False)
    password_file: Path | None = Field(
        default=None, description="File that contains the password, such as a mounted secret."
    )
    ca_file: Path | None = Field(
        default=None,
        description="File of the certificate authorities to trust, for url = tls://...: ca.pem of `penstock certs`; "
        "the system's unless given.",
    )
    replicas: Literal[1, 3, 5] = Field(
        default=1,
        description="Servers of a cluster that store each stream and bucket: 1, 3 or 5. `penstock bootstrap` sets it; "
        "more than half of them must be up.",
    )

    @field_validator("url")
    @classmethod
    def _no_credentials(cls, value: str) -> str:
        for address in value.split(","):
            if not address.strip():
                raise ValueError(f"an address is empty: {value!r}; separate several with one comma")
            _refuse_credentials(address, "nats.user and nats.password_file (or PENSTOCK_NATS__PASSWORD)")
        if len({address.strip().startswith(_TLS) for address in value.split(",")}) > 1:
            raise ValueError("either every address is tls://... or none: a password would go unencrypted to the others")
        return value

    @model_validator(mode="after")
    def _ca_is_used(self) -> NatsSettings:
        if self.ca_file is not None and not self.is_tls:
            raise ValueError(f"ca_file is for url = tls://..., got {self.url!r}; write tls:// or leave ca_file out")
        return self

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(address.strip() for address in self.url.split(","))

    @property
    def is_tls(self) -> bool:
        return self.url.strip().startswith(_TLS)

    def secret(self) -> str:
        """Return the password, from ``password_file`` if set; raises ConfigError if it is unreadable."""
        return secret_of(self.password, self.password_file, "nats.password_file")


class S3Settings(Section):
    """The object store and the credentials for it."""

    endpoint: str = Field(
        default="http://127.0.0.1:9000", description="URL of any S3 server: MinIO, a fork of it, or AWS."
    )
    bucket: Annotated[str, Field(min_length=3, max_length=63)] = Field(
        default="penstock", description="Bucket for trajectories and weights; created by the bootstrap."
    )
    credentials: Literal["keys", "aws"] = Field(
        default="keys",
        description="Where the login is from: keys: access_key, secret_key and session_token; aws: where AWS's tools "
        "look: the environment, ~/.aws/credentials, a web identity (IRSA) or the machine's role. Each is read again "
        "when it ends or is refused.",
    )
    access_key: str = Field(default="", description="Access key.")
    access_key_file: Path | None = Field(default=None, description="File that contains the access key.")
    secret_key: str = Field(default="", description="Secret key; prefer secret_key_file.", repr=False)
    secret_key_file: Path | None = Field(default=None, description="File that contains the secret key.")
    session_token: str = Field(
        default="", description="Session token of temporary keys; prefer session_token_file.", repr=False
    )
    session_token_file: Path | None = Field(default=None, description="File that contains the session token.")
    region: str = Field(default="us-east-1", description="Region; local servers ignore it.")
    ca_file: Path | None = Field(
        default=None,
        description="File of the certificate authorities to trust, for endpoint = https://...: ca.pem of `penstock "
        "certs`; the system's unless given.",
    )

    @model_validator(mode="after")
    def _ca_is_used(self) -> S3Settings:
        if self.ca_file is not None and not self.endpoint.startswith("https://"):
            raise ValueError(
                f"ca_file is for https:// endpoints, got {self.endpoint!r}; write https:// or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _one_login(self) -> S3Settings:
        is_set = [
            name
            for name in ("access_key", "secret_key", "session_token")
            for name in (name, f"{name}_file")
            if getattr(self, name)
        ]
        if self.credentials == "aws" and is_set:
            raise ValueError(f"credentials = 'aws' takes no {', '.join(is_set)}; leave out one of them")
        return self

    @field_validator("endpoint")
    @classmethod
    def _url(cls, value: str) -> str:
        _refuse_credentials(value, "s3.access_key and s3.secret_key_file (or PENSTOCK_S3__SECRET_KEY)")
        if not value.startswith(("http://", "https://")):
            raise ValueError(f"must start with http:// or https://, got {value!r}")
        return value

    def secret(self) -> str:
        return secret_of(self.secret_key, self.secret_key_file, "s3.secret_key_file")

    def keys(self) -> tuple[str, str, str]:
        """Return access key, secret key and session token; raises ConfigError if a file of them is unreadable."""
        file = self.access_key_file  # a name, not a secret
        access_key = self.access_key if file is None else content_of(file, "s3.access_key_file")
        return (
            access_key,
            self.secret(),
            secret_of(self.session_token, self.session_token_file, "s3.session_token_file"),
        )


def _refuse_credentials(url: str, instead: str) -> None:
    if "@" in url.partition("://")[2].partition("/")[0] or ("://" not in url and "@" in url):
        raise ValueError(f"a URL is shown in logs and errors and stored with the run: give credentials as {instead}")


def secret_of(value: str, file: Path | None, key: str) -> str:
    """Return ``value``, or the content of the file of the setting ``key``; raises ConfigError if it is unreadable."""
    return remember(value) if file is None else secret_file(file, key)
