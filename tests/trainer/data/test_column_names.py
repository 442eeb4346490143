"""The names of columns of a run file belong to the data that they were written for, whichever verb reads it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.deploy.data_check.commands import main
from penstock.fine_tuning import dpo, rm, sections, sft
from penstock.protocol.config.run_file import load
from penstock.protocol.errors import ConfigError
from penstock.trainer.parallel_dims import ParallelDims
from penstock.trainer.preflight import _open_source, open_data
from penstock.trainer.settings import GivenAnswersSettings, TrainerSettings

CHECK = ("data-check", "--no-tests")
ALONE = ParallelDims(SimpleNamespace(is_leader=False))  # type: ignore[arg-type]
ROWS = {
    "rl": {"problem": "sort 21", "solution": "12"},
    "sft": {"task": "sort 31", "trace": "13"},
    "dpo": {"q": "sort 41", "good": "14", "bad": "41"},
    "eval": {"item": "sort 51", "key": "15"},
    "aime": {"text": "sort 61", "gold": "16"},
}
MAPS = {
    "data": {"prompt": "problem", "ground_truth": "solution"},
    "sft": {"prompt": "task", "response": "trace"},
    "dpo": {"prompt": "q", "chosen": "good", "rejected": "bad"},
    "rm": {"prompt": "q", "chosen": "bad", "rejected": "good"},
    "eval": {"prompt": "item", "ground_truth": "key"},
    "eval.source.aime": {"prompt": "text", "ground_truth": "gold"},
}


def write_run(folder: Path, model: Path, *without: str) -> Path:
    for name, row in ROWS.items():
        (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    sections = {
        "data": {"train": "rl", "eval": "eval"}, "sft": {"data": "sft"}, "dpo": {"data": "dpo"},
        "rm": {"data": "dpo"}, "eval.source.aime": {"data": "aime"},
    }  # fmt: skip
    lines = ["[rollout]", "max_new_tokens = 16", "[model]", f'path = "{model}"', "[reward]", 'name = "exact"']
    for section in dict.fromkeys((*sections, *MAPS)):
        files = [f'{key} = "{folder / value}.jsonl"' for key, value in sections.get(section, {}).items()]
        columns = "" if section in without else ", ".join(f'{k} = "{v}"' for k, v in MAPS.get(section, {}).items())
        lines += [f"[{section}]", *files, f"map = {{{columns}}}" if columns else ""]
    (folder / "run.toml").write_text("\n".join(lines) + "\n")
    return folder / "run.toml"


def loaded(run: Path, *overrides: str) -> Any:
    return load(GivenAnswersSettings, files=[run], overrides=overrides, environ={})


def test_every_verb_reads_its_rows_by_their_own_names(tmp_path: Path, model: Path) -> None:
    run = write_run(tmp_path, model)
    settings, dims = loaded(run).settings, ALONE
    turns = sft.open_rows(settings, settings.sft.files, dims)
    pairs = dpo.open_rows(settings, settings.dpo.files, dims)
    scored = rm.open_rows(settings, settings.rm.files, dims)
    assert len(turns) == len(pairs) == len(scored) == 1
    assert pairs[0].chosen.tolist()[:2] == scored[0].rejected.tolist()[:2] != scored[0].chosen.tolist()[:2]
    tokenizer = sft.read_tokenizer(settings)
    trained = load(TrainerSettings, files=[run], environ={}).settings
    truths = [_open_source(trained, name, tokenizer).prompts[0].reward.ground_truth for name in ("eval", "aime")]
    assert truths == ['"15"', '"16"']


def test_data_check_reads_each_file_by_its_section(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path, model)
    assert main([*CHECK, "--run", str(run), "--show", "1"]) == 0
    printed = capsys.readouterr().out
    for column, key in (("task", "sft.map"), ("item", "eval.map"), ("text", "eval.source.aime.map")):
        assert f"prompt from {column} ({key}.prompt)" in printed
    assert printed.count("dpo.jsonl: 1 rows, format preference") == 2  # by dpo.map, and by rm.map
    assert "sft.jsonl, sft example 1" in printed
    assert main([*CHECK, str(tmp_path / "sft.jsonl"), "--run", str(run)]) == 0
    assert main([*CHECK, str(tmp_path / "sft.jsonl"), "--run", str(run), "--map", "prompt=trace"]) == 0


@pytest.mark.parametrize(
    ("section", "advice"),
    [
        ("sft", 'sft.map.prompt = "task"'),
        ("dpo", "name other columns as dpo.map.prompt"),
        ("eval", r"column problem: missing \(data.map.prompt\); the row has item, key"),
    ],
)
def test_rows_without_names_of_their_own_say_which_setting_names_them(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], section: str, advice: str
) -> None:
    """The rows of sft.data are not read by data.map; those of data.eval are, where there is no eval.map."""
    run = write_run(tmp_path, model, section)
    assert main([*CHECK, "--run", str(run)]) == 1
    assert advice.replace("\\", "") in capsys.readouterr().out


def test_a_map_of_other_rows_is_refused(tmp_path: Path, model: Path) -> None:
    run = write_run(tmp_path, model)
    _, unread = sections.SFT.chosen_settings(loaded(run), [])
    assert {"data.map.prompt", "data.map.ground_truth"} <= set(unread)
    override = "data.map.prompt=x"
    with pytest.raises(ConfigError, match=r"data.map.prompt is not read by `penstock sft`; .* use sft.map"):
        sections.SFT.chosen_settings(loaded(run, override), [override])
    (tmp_path / "one.toml").write_text(f'[model]\npath = "{model}"\n[data]\ntrain = "x"\nmap = {{prompt = "p"}}\n')
    settings, unread = sections.SFT.chosen_settings(loaded(tmp_path / "one.toml"), [])
    assert (settings.data_of("sft").map, unread) == ({"prompt": "p"}, [])
    settings = loaded(tmp_path / "one.toml", "data.train=[]", "sft.data=y").settings
    assert settings.data_of("sft").map == {"prompt": "p"}, "data.map is of the only rows that there are"
    settings = loaded(tmp_path / "one.toml", "sft.map.prompt=q").settings
    assert settings.data_of("sft").map == {"prompt": "q"}, "one file that two verbs read"


def test_names_for_pairs_beside_groups_are_refused(tmp_path: Path, model: Path) -> None:
    run = write_run(tmp_path, model)
    overrides = ["algorithm.dpo_coefficient=1.0", "dpo.data=[]"]
    with pytest.raises(ConfigError, match=r"by data.map, not by dpo.map"):
        load(TrainerSettings, files=[run], overrides=overrides, environ={})


def test_names_for_no_held_out_prompts_are_refused(tmp_path: Path, model: Path) -> None:
    run = tmp_path / "run.toml"
    (tmp_path / "rl.jsonl").write_text(json.dumps({"prompt": "sort 21", "ground_truth": "12"}) + "\n")
    run.write_text(
        f'[model]\npath = "{model}"\n[data]\ntrain = "{tmp_path}/rl.jsonl"\n[rollout]\nmax_new_tokens = 16\n'
    )
    settings = load(TrainerSettings, files=[run], overrides=["reward.name=exact"], environ={}).settings
    assert [len(prompts) for prompts in open_data(settings).sets] == [1]
    settings = load(TrainerSettings, files=[run], overrides=["eval.map.prompt=q"], environ={}).settings
    with pytest.raises(ConfigError, match=r"eval.map names columns of held-out prompts, and there are none"):
        open_data(settings)
