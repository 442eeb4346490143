"""The generated configuration of nats-server; `test_nats_attacks.py` has what it refuses on a real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.deploy import make_secrets
from penstock.deploy import nats_config as command
from penstock.deploy.nats_config import nats_config
from penstock.protocol.errors import ConfigError

CONFIG = Path(__file__).parents[2] / "deploy" / "nats.conf"


def test_the_committed_file_matches_the_rights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`--check` passes for the file in the repository, and names the command that repairs another one."""
    tls = ["--tls", "/etc/nats/tls"]
    assert command.main([*tls, "--check", str(CONFIG)]) == 0
    (tmp_path / "old.conf").write_text("listen: 0.0.0.0:4222\n")
    assert command.main([*tls, "--check", str(tmp_path / "old.conf")]) == 1
    assert (
        f"python -P -m penstock.deploy.nats_config --tls /etc/nats/tls > {tmp_path}/old.conf" in capsys.readouterr().err
    )
    assert command.main(tls) == 0
    assert capsys.readouterr().out == CONFIG.read_text()


def test_a_server_without_a_container_has_its_own_paths(capsys: pytest.CaptureFixture[str]) -> None:
    """Passwords and data are where they are said to be; a path that would be something else in the file is refused."""
    assert command.main(["--run", "r", "--passwords", "nats_passwords.conf", "--store", "secrets/nats"]) == 0
    text = capsys.readouterr().out
    assert '\ninclude "nats_passwords.conf"\n' in text
    assert "\n  store_dir: secrets/nats\n" in text
    assert "nats_config --run r --passwords nats_passwords.conf --store secrets/nats`" in text
    assert "tls {" not in text
    assert command.main(["--tls", 'a"']) == 1
    assert command.main(["--store", "a\n}"]) == 1
    assert "--store" in capsys.readouterr().err


def test_an_invalid_run_id_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="run id"):
        nats_config(["*"])
    assert command.main(["--run", "A.b"]) == 1
    assert "run id" in capsys.readouterr().err


def test_help_is_no_folder_of_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert make_secrets.main(["--help"]) == 0
    assert "existing files are kept" in " ".join(capsys.readouterr().out.split())
    assert list(tmp_path.iterdir()) == []
