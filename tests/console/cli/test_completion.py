"""Completion in real shells: bash here, and any of zsh and fish that is installed reads its script without an error."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from penstock.console.cli.main import app
from penstock.console.cli.verb_help import script, words_of
from penstock.console.tools import explain_settings
from penstock.protocol.errors import ConfigError

CRITIC = [
    key.removeprefix("critic.") for key in explain_settings.load_reference().settings if key.startswith("critic.")
]
CASES = {
    "penstock qui": {"quickstart"},
    "penstock reward serve-": {"serve-grader", "serve-judge", "serve-model"},
    "penstock train --lo": {"--local"},
    "penstock quickstart --en": {"--engine"},
    "penstock train mine.toml rollout.max_": {"rollout.max_attempts=", "rollout.max_new_tokens=", "rollout.max_staleness="},
    "penstock train mine.toml --trainer.step": {"--trainer.steps"},
    "penstock train algorithm.name=gsp": {"gspo", "gspo_token", "gspo_turn"},
    "penstock train model.dtype=": {"float32", "bfloat16"},
    "penstock train data.train=mi": {"mine.toml"},
    "penstock train ev": {"eval."},
    "penstock train mi": {"mine.toml"},
    "penstock watch ": {"first", "second"},
    "penstock runs show fi": {"first"},
    "penstock weights exp": {"export"},
    "penstock settings trainer.l": {"trainer.lr", "trainer.lease_s", "trainer.local_checkpoints"},
    "penstock settings crit": {"critic", *(f"critic.{name}" for name in CRITIC)},
    "/opt/bin/penstock config ": {"import", "show"},
}  # fmt: skip


def test_bash_completes_verbs_flags_settings_values_files_and_runs(tmp_path: Path):
    """In one real bash: what the tab key offers for each line."""
    for name in ("first", "second"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "mine.toml").touch()
    asked = "".join(
        f"COMP_LINE='{line}' COMP_POINT={len(line)}; _penstock; echo \"${{COMPREPLY[@]}}\"\n" for line in CASES
    )
    done = subprocess.run(
        ["bash", "--norc", "-eu", "-c", f"{script('bash', app)}\nset +eu\n{asked}"],
        capture_output=True, text=True, timeout=30, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert {line: set(answer.split()) for line, answer in zip(CASES, done.stdout.splitlines(), strict=True)} == CASES


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_verb_flag_and_setting_is_in_the_script(shell: str):
    """And a shell that is installed finds no error in it."""
    text, words = script(shell, app), words_of(app)
    assert {"train", "reward serve", "runs rm"} <= words.verbs.keys()
    assert {"--local", "--workers"} <= set(words.flags["train"])
    for verb, following in words.verbs.items():
        assert verb in text
        assert all(word in text for word in following)
    assert all(flag.removeprefix("--") in text for flags in words.flags.values() for flag in flags)
    assert all(key in text for key in explain_settings.load_reference().settings if ".NAME." not in key)
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=text, text=True, timeout=30, check=True)


def test_another_shell_is_refused():
    with pytest.raises(ConfigError, match="no completion for tcsh; choose one of bash, zsh, fish"):
        script("tcsh", app)
