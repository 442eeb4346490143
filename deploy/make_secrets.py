"""Make the secrets of a compose deployment: one password per NATS role, the S3 secret key, the reward token.

    python -m penstock.deploy.make_secrets [FOLDER]        # default: deploy/secrets

Existing files are kept, so the command can be repeated. Only the owner may enter the folder; the
files are readable, because a container reads its mounted secret under another user id.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

NATS_USERS = ("admin", "trainer", "rollout", "reward", "viewer")
OTHERS = ("s3_secret_key", "reward_token")
_BYTES = 24


def make_secrets(folder: Path) -> list[Path]:
    """Create the missing files; returns those that were written."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    written = [folder / name for name in (*(f"nats_{user}" for user in NATS_USERS), *OTHERS)]
    written = [path for path in written if not path.exists()]
    for path in written:
        path.write_text(secrets.token_hex(_BYTES))
    passwords = folder / "nats_passwords.conf"
    lines = [f'{user.upper()}_PASSWORD: "{(folder / f"nats_{user}").read_text().strip()}"\n' for user in NATS_USERS]
    if not passwords.exists() or passwords.read_text() != "".join(lines):
        passwords.write_text("".join(lines))
        written.append(passwords)
    return written


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the secrets and print the files that were written."""
    parser = argparse.ArgumentParser(
        prog="python -P -m penstock.deploy.make_secrets",
        description="Make the secrets of a deployment: a password for each NATS role (nats_ROLE, and nats_passwords.conf, which nats.conf "
        "includes as passwords.conf), the S3 secret key, the reward token. Existing files are kept.",
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, default=Path(__file__).with_name("secrets"), help="where to write them"
    )
    for path in make_secrets(parser.parse_args(arguments).folder):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
