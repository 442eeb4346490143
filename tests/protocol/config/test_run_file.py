"""The loader of run files: precedence, spelling, origins, and all errors together."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, model_validator

from penstock.protocol.config.connection import NatsSettings, RunSettings, Section
from penstock.protocol.config.foreign_config import ABSENT, RENAMED, advice
from penstock.protocol.config.run_file import SECTIONS, config_document, format_config, load, split_arguments
from penstock.protocol.config.sources import key_lines
from penstock.protocol.errors import ConfigError


class TrainerPart(Section):
    steps: int = Field(description="Optimizer steps.", ge=1)
    lr: float = Field(1e-6, gt=0, description="Learning rate.")
    betas: tuple[float, float] = (0.9, 0.95)
    dual_clip: float | None = 1.2
    resume: bool = True
    schedule: Literal["linear", "cosine"] = "linear"


class DataPart(Section):
    train: str | list[str] = "train.jsonl"
    map: dict[str, str] = Field(default={})
    system_prompt: str = ""


class RolloutPart(Section):
    group_size: int = 8
    max_staleness: int = 2


class Everything(Section):
    run: RunSettings = RunSettings()
    nats: NatsSettings = NatsSettings()
    trainer: TrainerPart
    data: DataPart = DataPart()
    rollout: RolloutPart = RolloutPart()

    @model_validator(mode="after")
    def _enough(self) -> Everything:
        if self.rollout.group_size < self.rollout.max_staleness:
            raise ValueError("rollout.group_size is below rollout.max_staleness; raise it")
        return self


class WorkerOnly(Section):
    nats: NatsSettings = NatsSettings()


def write(folder: Path, text: str, name: str = "run.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refused(files: list[Path] | None = None, *overrides: str, environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(Everything, files=files or [], overrides=overrides, environ=environ)
    return str(caught.value).split("\n")


def test_a_file_gives_values_and_their_lines(tmp_path: Path):
    file = write(tmp_path, "# mine\n[run]\nid = 'abc'\n\n[trainer]\nsteps = 3\nbetas = [\n 0.9,\n 0.99,\n]\nlr = 1\n")
    loaded = load(Everything, files=[file])
    assert loaded.settings.run.id == "abc"
    assert loaded.settings.trainer.betas == (0.9, 0.99)
    assert loaded.origins["run.id"] == f"{file}:3"
    assert loaded.origins["trainer.steps"] == f"{file}:6"
    assert loaded.origins["trainer.betas"] == f"{file}:7"
    assert loaded.origins["trainer.lr"] == f"{file}:11"
    assert loaded.origins["trainer.resume"] == "default"


@pytest.mark.parametrize("key", ["run.seed", "trainer.steps", "rollout.group_size"])
def test_override_beats_environment_beats_later_file_beats_earlier_file(tmp_path: Path, key: str):
    section, name = key.split(".")
    first = write(
        tmp_path,
        f"[trainer]\nsteps=1\n[{section}]\n{name}=3\n".replace("[trainer]\nsteps=1\n[trainer]", "[trainer]"),
        "a.toml",
    )
    second = write(tmp_path, f"[{section}]\n{name} = 4\n", "b.toml")
    environ = {f"PENSTOCK_{section.upper()}__{name.upper()}": "5"}

    def value(**kwargs) -> tuple[int, str]:
        loaded = load(Everything, **kwargs)
        return getattr(getattr(loaded.settings, section), name), loaded.origins[key]

    assert value(files=[first]) == (3, f"{first}:{4 if section != 'trainer' else 2}")
    assert value(files=[first, second]) == (4, f"{second}:2")
    assert value(files=[first, second], environ=environ) == (5, f"environment {next(iter(environ))}")
    assert value(files=[first, second], environ=environ, overrides=[f"{key}=6"]) == (6, "override")


@pytest.mark.parametrize(
    "tokens",
    [
        ["trainer.lr=1e-4", "rollout.max_staleness=1"],
        ["--trainer.lr", "1e-4", "--rollout.max-staleness", "1"],
        ["--trainer.lr=1e-4", "--rollout.max-staleness=1"],
        ["trainer.lr=1e-4", "rollout.max-staleness=1"],
    ],
)
def test_overrides_are_read_in_every_habit(tokens: list[str]):
    """`a.b=c`, `--a.b c` and `--a.b=c` mean the same, in snake and in kebab case."""
    settings = load(Everything, overrides=["trainer.steps=2", *tokens]).settings
    assert (settings.trainer.lr, settings.rollout.max_staleness) == (1e-4, 1)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.resume=false", False),
        ("trainer.resume=False", False),
        ("trainer.betas=[0.5, 0.6]", (0.5, 0.6)),
        ("trainer.dual_clip=None", None),
        ("trainer.dual_clip=null", None),
        ("data.train=my file.jsonl", "my file.jsonl"),
        ('data.train=["a.jsonl", "b.jsonl"]', ["a.jsonl", "b.jsonl"]),
        ("data.train=7", "7"),
        ('data.system_prompt="quoted # text"', "quoted # text"),
        ("data.system_prompt=a # b", "a # b"),
        ("data.system_prompt=two\nlines", "two\nlines"),
        ("data.system_prompt=x=y", "x=y"),
        ("run.id=7", "7"),
        ("trainer.schedule=cosine", "cosine"),
    ],
)
def test_override_texts_are_toml_scalars_or_strings(override: str, expected: object):
    """What TOML cannot read is a string, and a field that takes only text takes digits as text."""
    loaded = load(Everything, overrides=["trainer.steps=2", override])
    section, name = override.partition("=")[0].split(".")
    assert getattr(getattr(loaded.settings, section), name) == expected


def test_dictionaries_merge_and_lists_replace(tmp_path: Path):
    """Tables merge key by key over the chain of files and overrides; a list is replaced as a whole."""
    first = write(tmp_path, "[trainer]\nsteps=1\n[data]\ntrain=['a','b']\nmap={prompt='q'}\n", "a.toml")
    second = write(tmp_path, "[data]\ntrain=['c']\n[data.map]\nanswer='a'\n", "b.toml")
    loaded = load(Everything, files=[first, second], overrides=["data.map.source=s", 'data.map."x.y"=z'])
    assert loaded.settings.data.train == ["c"]
    assert loaded.settings.data.map == {"prompt": "q", "answer": "a", "source": "s", "x.y": "z"}
    assert loaded.origins["data.map.prompt"] == f"{first}:5"
    assert loaded.origins["data.map.answer"] == f"{second}:4"


def test_none_clears_values_of_files(tmp_path: Path):
    file = write(tmp_path, "[trainer]\nsteps=1\nlr=0.5\ndual_clip='none'\n[data]\nmap={prompt='q'}\n")
    loaded = load(Everything, files=[file], overrides=["data.map=None", "trainer.lr=None"])
    assert loaded.settings.data.map == {}
    assert loaded.settings.trainer.lr == 1e-6
    assert loaded.origins["trainer.lr"] == "default"
    assert loaded.settings.trainer.dual_clip is None


def test_sections_of_other_services_are_left_alone(tmp_path: Path):
    """A service ignores known sections that it does not read, and still refuses unknown ones."""
    file = write(tmp_path, "[trainer]\nsteps=1\nnonsense=2\n[nats]\nurl='nats://x'\n")
    loaded = load(WorkerOnly, files=[file], overrides=["rollout.group_size=3"])
    assert loaded.settings.nats.url == "nats://x"
    with pytest.raises(ConfigError, match=r"unknown section \[worke\]; did you mean \[worker\]"):
        load(WorkerOnly, overrides=["worke.id=3"])


@pytest.mark.parametrize(
    ("line", "reply"),
    [
        ("trainer.stpes = 3", "unknown key trainer.stpes; did you mean trainer.steps?"),
        ("trainer.group_size = 3", "unknown key trainer.group_size; did you mean rollout.group_size?"),
        ("trainer.save_steps = 3", "unknown key trainer.save_steps; did you mean trainer.checkpoint_every?"),
        ("rollot.group_size = 3", "unknown section [rollot]; did you mean [rollout]?"),
        ("zzz.y = 3", "unknown section [zzz]; the sections are run, nats"),
        ("trainer.lr.x = 3", "unknown key trainer.lr.x"),
        ("kl_loss_coef = 0.1", "a key of another project; use algorithm.kl_coefficient"),
        ("data.truncation = 'error'", "a key of another project; use data.overlong"),
        ("n_gpus = 5", "a key of another project; use trainer.num_ranks"),
        ("trainer.steps = '5'", 'trainer.steps: expected a valid integer, got "5"'),
        ("trainer.steps = 5.5", "trainer.steps: expected a valid integer, got 5.5"),
        ("trainer.steps = 0", "trainer.steps: expected greater than or equal to 1, got 0"),
        ("trainer.resume = 1", "trainer.resume: expected a valid boolean, got 1"),
        ("trainer.schedule = 'x'", "trainer.schedule: expected 'linear' or 'cosine', got \"x\""),
        ("trainer.betas = [0.9, 'x']", "expected a valid number (entry 2)"),
        ("trainer.lr = 2024-01-01", 'expected a valid number, got "2024-01-01"'),
        ("data.train = 3", "expected a valid string or expected a valid array, got 3"),
        ("data.map = 3", "data.map is a section, not a value"),
        ("run.id = 'A b'", "must be 1 to 48 characters"),
    ],
)
def test_a_wrong_line_is_named_with_its_remedy(tmp_path: Path, line: str, reply: str):
    """Every refusal begins with file and line and ends with what to write instead."""
    file = write(tmp_path, f"# one\n{line}\n")
    message = refused([file], *([] if line.startswith("trainer.steps") else ["trainer.steps=1"]))[0]
    assert message.startswith(f"{file}:2: ")
    assert reply in message


def test_all_errors_are_reported_together(tmp_path: Path):
    """One call reports all errors of file, environment and overrides; a wrong section once."""
    file = write(tmp_path, "[trainr]\na=1\nb=2\n[trainer]\nlr='x'\n")
    messages = refused([file], "rollout.grup_size=1", environ={"PENSTOCK_RUN__IDD": "x"})
    assert len(messages) == 5
    assert messages[0] == f"{file}:2: unknown section [trainr]; did you mean [trainer]?"
    assert messages[1] == "environment PENSTOCK_RUN__IDD: unknown key run.idd; did you mean run.id?"
    assert messages[2] == "override: unknown key rollout.grup_size; did you mean rollout.group_size?"
    assert messages[3] == f'{file}:5: trainer.lr: expected a valid number, got "x"'
    assert messages[4] == "trainer.steps is required: set `steps` under [trainer] or as an override"


def test_a_contradiction_between_keys_names_both_origins(tmp_path: Path):
    file = write(tmp_path, "[trainer]\nsteps=1\n[rollout]\ngroup_size = 1\n")
    [message] = refused([file], "rollout.max_staleness=3")
    assert message == (
        "rollout.group_size is below rollout.max_staleness; raise it "
        f"[rollout.group_size: {file}:4] [rollout.max_staleness: override]"
    )


@pytest.mark.parametrize(
    ("content", "reply"),
    [
        (b"[trainer]\nsteps = = 3\n", ":2: not valid TOML"),
        (b"[trainer]\nx = [1,\n", ":3: not valid TOML"),
        (b"[trainer]\nx = '\xff'\n", ": not UTF-8 text (at byte 15)"),
        (None, ": not readable (No such file or directory)"),
    ],
)
def test_unreadable_files_are_named(tmp_path: Path, content: bytes | None, reply: str):
    file = tmp_path / "run.toml"
    if content is not None:
        file.write_bytes(content)
    [message] = refused([file])
    assert f"{file}{reply}" in message


@pytest.mark.parametrize("tokens", [["--trainer.steps"], ["trainer.steps"], ["=3"], ["--trainer.steps", "--run.id=x"]])
def test_an_override_without_a_value_is_refused(tokens: list[str]):
    assert "expected section.key=value or --section.key value" in refused(None, *tokens)[0]


def test_environment_of_others_is_ignored():
    """Only PENSTOCK_<SECTION>__<KEY> is read; digits are kept as text for text fields."""
    environ = {"PATH": "x", "PENSTOCK_SOMETHING": "y", "RUN__ID": "z", "PENSTOCK_NATS__PASSWORD": "0123"}
    loaded = load(Everything, overrides=["trainer.steps=1"], environ=environ)
    assert loaded.settings.nats.password == "0123"


def test_secrets_are_masked_everywhere():
    environ = {"PENSTOCK_NATS__PASSWORD": "hunter2"}
    loaded = load(Everything, overrides=["trainer.steps=1"], environ=environ)
    assert "hunter2" not in format_config(loaded)
    assert "hunter2" not in str(config_document(loaded))
    assert config_document(loaded)["settings"]["nats"]["password"] == "********"
    wrong = {"PENSTOCK_NATS__PASSWORD": '["hunter2"]'}
    assert "hunter2" not in refused(None, "trainer.steps=1", environ=wrong)[0]


@pytest.mark.parametrize(
    "given", ["nats.password=x1", "--nats.password x1", "nats={password = 'x1'}", 'nats.password=["x1"]']
)
def test_a_secret_on_the_command_line_is_refused(given: str, tmp_path: Path):
    """Other users see it there (ps); the error names the file and the variable to use, and not the secret."""
    [problem, *_] = refused(None, "trainer.steps=1", *given.split(" ", 1 if given.startswith("--") else 0))
    assert "nats.password is refused on the command line" in problem
    assert "nats.password_file = FILE, or the environment variable PENSTOCK_NATS__PASSWORD" in problem
    assert "x1" not in problem
    file = write(tmp_path, "[nats]\npassword = 'x1'\n")
    assert load(Everything, files=[file], overrides=["trainer.steps=1"]).settings.nats.password == "x1"
    assert load(Everything, files=[file], overrides=["trainer.steps=1", "nats.password="]).settings.nats.password == ""


def test_shown_config_reads_back_as_itself(tmp_path: Path):
    """`config show` prints TOML with origins; loading that text gives the same settings."""
    overrides = [
        "trainer.steps=9",
        "trainer.dual_clip=None",
        'data.map."a b"=c',
        'data.train=["x\\"y"]',
        "trainer.lr=1e-7",
    ]
    loaded = load(Everything, overrides=overrides)
    shown = format_config(loaded)
    assert 'data.map."a b" = "c"' in shown
    assert any(line.startswith("trainer.steps = 9 ") and line.endswith("# override") for line in shown.splitlines())
    again = load(Everything, files=[write(tmp_path, shown)])
    assert again.settings == loaded.settings


def test_files_and_overrides_are_distinguished():
    """Bare words are run files, `@` is allowed before them, and a value after `--key` is no file."""
    files, overrides = split_arguments(
        ["a.toml", "trainer.lr=1", "--data.train", "x.toml", "@", "b.toml", "@c.toml", "--run.id=y"]
    )
    assert files == [Path("a.toml"), Path("b.toml"), Path("c.toml")]
    assert overrides == ["trainer.lr=1", "--data.train", "x.toml", "--run.id=y"]


def test_lines_are_found_in_awkward_toml():
    """Multi-line strings, arrays of tables, quoted keys and text that looks like keys do not confuse the line finder."""
    text = '\n[a."b c"]\nx = """\n[fake]\ny = 1\n"""\nz.w = 2\n\n[[list]]\nk = 1\n\n[a] # c\nq = {r = 1}'
    lines = key_lines(text)
    assert lines["a", "b c"] == 2
    assert lines["a", "b c", "x"] == 3
    assert lines["a", "b c", "z", "w"] == 7
    assert lines["list", "k"] == 10
    assert lines["a", "q", "r"] == 13
    assert ("fake",) not in lines
    assert ("a", "b c", "y") not in lines


@given(st.lists(st.sampled_from(["x = 1", "", "# c", "y = [\n1,\n2]", "z = '''\nq = 1\n'''"]), unique=True))
def test_every_key_is_on_the_line_that_was_found(statements: list[str]):
    text = "\n".join(statements)
    lines = text.split("\n")
    assert {path[0] for path in key_lines(text)} == set(tomllib.loads(text))
    for (key,), line in key_lines(text).items():
        assert lines[line - 1].startswith(f"{key} =")


def test_advice_points_to_sections_that_exist():
    """Every foreign name is answered with a key of a known section, or with a reason why there is none."""
    assert len(RENAMED) >= 40
    assert not RENAMED.keys() & ABSENT.keys()
    for name, target in RENAMED.items():
        assert target.startswith("`penstock") or target.split(".")[0] in SECTIONS, name
        assert target in str(advice(name))
    assert advice("nothing.like.this") is None


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p", "repetition_penalty"])
def test_what_makes_log_probabilities_inexact_is_refused_with_the_reason(name: str):
    """Keys that change the distribution of training samples are refused with a reason, not as unknown keys."""

    class Rollout(Section):
        temperature: float = 1.0

    class Known(Section):
        rollout: Rollout = Rollout()

    with pytest.raises(ConfigError, match=rf"rollout\.{name} is refused: tokens would come from another distribution"):
        load(Known, overrides=[f"rollout.{name}=0.9"])
