"""Make the secrets of a compose deployment: one password per NATS role, the S3 secret key, the reward token.

    python -m penstock.deploy.make_secrets [FOLDER]        # default: deploy/secrets

Existing files are kept, so the command can be repeated. Only the owner may enter the folder; the
files are readable, because a container reads its mounted secret under another user id.
"""

from __future__ import annotations

import secrets
import sys
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


def main() -> int:
    """Make the secrets and print the files that were written."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("secrets")
    for path in make_secrets(folder):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
