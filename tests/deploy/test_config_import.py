"""`penstock config import`: files as other systems have them become run files that every service accepts."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from tests.deadline import ends_within

from penstock.agents.proxy.answer_formats.answer_format import ANSWER_FORMATS
from penstock.console.cli.main import run
from penstock.console.cli.train_verbs import import_
from penstock.deploy.config_import import import_config
from penstock.deploy.config_import.foreign_file import read_shell
from penstock.deploy.config_import.foreign_tree import read_yaml
from penstock.deploy.config_import.system_rules import agentrl_environment
from penstock.deploy.config_show import load_all
from penstock.protocol.errors import ConfigError

HELD = "a0: &a0 {x: 1}\n"
GROWING = {
    "aliases of lists": (
        read_yaml,
        "a0: &a0 [1, 1]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)),
    ),
    "aliases of mappings": (
        read_yaml,
        HELD + "".join(f"a{n}: &a{n} {{{', '.join(f'k{i}: *a{n - 1}' for i in range(9))}}}\n" for n in range(1, 12)),
    ),
    "merged mappings": (
        read_yaml,
        HELD + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12)),
    ),
    "an alias of itself": (read_yaml, "a: &a [*a]\n"),
    "a mapping that holds itself": (read_yaml, "a: &a {b: *a}\n"),
    "references": (
        read_yaml,
        f"a0: {'x' * 999}\n" + "".join(f"a{n}: '{f'${{a{n - 1}}}' * 900}'\n" for n in range(1, 5)),
    ),
    "references of references": (read_yaml, "a: ${b}${b}\nb: ${a}${a}" + "x" * 9999),
    "variables": (read_shell, "A=12345678\n" + "A=$A$A$A$A$A$A$A$A\n" * 9),
    "variables in quotes": (read_shell, "A=1234\n" + 'A="${A}x${A}x${A}x${A}"\n' * 15),
    "more values than a configuration has": (read_yaml, "[" + '"a",' * 250_000 + "]"),
    "a tag of another value": (read_yaml, "a: !!timestamp x"),
    "a long script": (read_shell, "a\n" * 2**18),
    "one variable often": (read_shell, f"A={'x' * 9999}\n" + "B=$A\n" * 999),
    "variables of a command": (read_shell, f"A={'x' * 99_999}\npython train.py " + "--a $A " * 999),
    "arrays": (read_shell, "A=(1 2)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 40),
    "arrays that are added to": (read_shell, "A=(1 2)\n" + 'A+=("${A[@]}" "${A[@]}")\n' * 40),
    "an array in a command": (read_shell, f"A=({'x ' * 9999})\npython train.py " + '"${A[@]}" ' * 999),
}


@pytest.mark.parametrize("name", GROWING)
def test_a_small_file_that_becomes_a_large_one_is_refused(name: str) -> None:
    """Aliases, references, variables and arrays that repeat one another end as an error, in a second."""
    read, text = GROWING[name]
    with (
        ends_within(20.0),
        pytest.raises(
            ConfigError,
            match=r"aliases repeat more|more than 100000 values|a script of|groupdict|variables become more|recursion",
        ),
    ):
        read("x", text)


FILES = Path(__file__).parents[1] / "data" / "foreign_configs"

# file → system, exit code, settings that it must have among others, keys that need a decision or are unknown
EXPECTED: dict[str, tuple[str, int, dict[str, Any], list[str]]] = {
    "verl_grpo.sh": ("verl", 0, {
        "algorithm.name": "grpo", "model.path": "Qwen/Qwen2.5-7B-Instruct", "data.train": f"{Path.home()}/data/gsm8k/train.parquet",
        "rollout.groups_per_step": 1024, "algorithm.minibatches": 4, "rollout.max_new_tokens": 1024, "rollout.group_size": 5,
        "algorithm.kl_coefficient": 0.001, "algorithm.kl_form": "k3", "algorithm.clip_low": 0.2, "algorithm.clip_high": 0.28,
        "data.overlong": "drop", "worker.engine": "vllm", "vllm.tensor_parallel_size": 2, "vllm.gpu_memory_utilization": 0.6,
        "run.id": "qwen25-7b", "eval.every": 5, "trainer.lr": 1e-6, "model.gradient_checkpointing": True,
    }, []),
    "verl_sft.sh": ("verl", 1, {
        "sft.lr": 1e-5, "model.lora.rank": 32, "model.lora.alpha": 64, "data.map.response": "response", "data.map.prompt": "extra_info.question", "trainer.num_ranks": 4,
        "run.id": "qwen7b-sft", "sft.epochs": 3, "sft.eval_data": "/data/sft_val.parquet",
        "sft.batch_size": 256, "sft.schedule": "cosine", "trainer.min_lr_ratio": 0.0, "model.dtype": "bfloat16", "run.seed": 1,
    }, ["optim.lr_warmup_steps_ratio"]),
    "verl_ppo.yaml": ("verl", 1, {
        "algorithm.name": "ppo", "critic.lam": 0.95, "trainer.steps": 100, "trainer.checkpoint_every": 20, "sglang.tp_size": 2,
        "trainer.lr": 1e-6, "algorithm.aggregation": "seq-mean-token-sum-norm", "rollout.max_new_tokens": 1024,
    }, ["critic.ppo_mini_batch_size", "reward_model.path"]),
    "roll_agentic.yaml": ("roll", 1, {
        "run.id": "agentic-pipeline", "rollout.max_new_tokens": 4096, "rollout.stop": ["</answer>"], "algorithm.dual_clip": 1.4,
        "algorithm.reward_norm": "group", "model.dtype": "bfloat16", "model.gradient_checkpointing": True, "trainer.warmup_steps": 20,
        "worker.engine": "vllm", "vllm.max_model_len": 8000, "trainer.resume": False,
    }, ["defaults", "eval.every", "actor_infer.generating_args.top_p",
        "actor_infer.generating_args.top_k", "reward.name"]),
    "agentrl.sh": ("agentrl", 1, {
        "algorithm.name": "GRPO", "algorithm.clip_high": 0.28, "rollout.groups_per_step": 8, "worker.engine": "sglang",
        "sglang.mem_fraction_static": 0.6, "eval.every": 0,
    }, ["balance_sample", "sync_sampling", "data.train", "reward.name"]),
    "trl_grpo.json": ("trl", 1, {
        "algorithm.name": "grpo", "run.id": "grpo-run", "rollout.groups_per_step": 2, "trainer.warmup_steps": 20,
        "trainer.betas": [0.9, 0.99], "algorithm.kl_coefficient": 0.04, "algorithm.aggregation": "seq-mean-token-sum-norm",
        "algorithm.normalise_by_std": False, "worker.engine": "vllm", "rollout.stop": ["</answer>"], "trainer.steps": 200,
    }, ["colour_of_the_logs", "data.train", "reward.name"]),
    "trl_whole.json": ("trl", 1, {  # GRPOConfig(...).to_dict() of TRL 1.16
        "rollout.max_staleness": 0, "trainer.schedule": "linear", "trainer.betas": [0.9, 0.999], "trainer.steps": 200,
        "rollout.groups_per_step": 8, "trainer.checkpoint_every": 500, "eval.every": 0,
    }, ["model.path", "data.train", "reward.name"]),
    "trl_dpo.sh": ("trl", 1, {
        "dpo.lr": 5e-7, "dpo.steps": 500, "dpo.beta": 0.2, "dpo.loss": "robust", "dpo.label_smoothing": 0.1,
        "dpo.divergence": "js_divergence", "dpo.reference": "precomputed", "model.lora.rank": 16,
        "dpo.batch_size": 8, "dpo.schedule": "linear", "dpo.betas": [0.9, 0.999], "run.seed": 42, "model.dtype": "bfloat16",
    }, ["max_length"]),
    "platform_job.json": ("agentrl", 1, {
        "algorithm.name": "grpo", "run.id": "qwen7b-grpo-math", "data.eval": "/data/gsm8k/test.parquet", "rollout.groups_per_step": 1024,
    }, ["context_length", "reward.name"]),
    "openrlhf.sh": ("openrlhf", 1, {
        "algorithm.name": "grpo", "rollout.groups_per_step": 64, "algorithm.minibatches": 4, "algorithm.clip_high": 0.28,
        "algorithm.kl_coefficient": 1e-3, "algorithm.kl_form": "k3", "trainer.num_ranks": 4, "vllm.engines": 4, "trainer.zero_stage": 3,
        "run.id": "llama3-8b-rlhf", "data.map.prompt": "context_messages",
    }, ["remote_rm_url", "lr_warmup_ratio"]),
    "slime.sh": ("slime", 1, {
        "model.path": "/models/Qwen3-4B", "sglang.engines": 2, "sglang.tp_size": 2, "rollout.stop": ["</answer>"],
        "algorithm.importance": "token", "algorithm.importance_high": 2.0, "algorithm.ratio_anchor": "proximal", "trainer.betas": [0.9, 0.98], "trainer.micro_batch_tokens": 9216, "trainer.steps": 3000,
        "rollout.groups_per_step": 32, "algorithm.clip_low": 0.2, "algorithm.clip_high": 0.28,
    }, ["rm_type", "tensor_model_parallel_size"]),
}  # fmt: skip


def imported(file: Path, to: Path, *flags: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = run(["config", "import", str(file), "--to", str(to), "--json", *flags])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_configuration_of_each_system_becomes_a_run_file(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The system is detected, the settings are in the file, all services accept it, and open questions are named."""
    system, expected_code, settings, open_keys = EXPECTED[name]
    to = tmp_path / "run.toml"
    code, report = imported(FILES / name, to, capsys=capsys)
    assert (code, report["system"]) == (expected_code, system)
    assert [one["key"] for one in report["keys"] if one["kind"] in ("decide", "unknown")] == open_keys
    written = tomllib.loads(to.read_text())
    for key, value in settings.items():
        node: Any = written
        for part in key.split("."):
            node = node[part]
        assert (key, node) == (key, value)
    load_all([to], [], {})


def documented() -> dict[str, tuple[str, str, str]]:
    """Return the two files of each system in docs/coming_from.md: the form of theirs, theirs, ours."""
    page = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text()
    blocks = re.findall(
        r"^## (\w+)\n(?:(?!^## ).)*?```(bash|json|yaml)\n(.*?)```\n\n```toml\n(.*?)```", page, re.DOTALL | re.MULTILINE
    )
    return {name.lower(): (form, theirs, ours) for name, form, theirs, ours in blocks}


@pytest.mark.parametrize("system", ["verl", "trl", "roll", "agentrl", "openrlhf", "slime"])
def test_the_documented_run_files_are_what_an_import_writes(
    system: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    form, theirs, ours = documented()[system]
    file = tmp_path / {"bash": "a.sh", "json": "a.json", "yaml": "a.yaml"}[form]
    file.write_text(theirs)
    code, report = imported(file, tmp_path / "run.toml", capsys=capsys)
    assert report["system"] == system
    undecided = {one["key"] for one in report["keys"] if one["kind"] in ("decide", "unknown")}
    assert undecided <= {"data.train", "reward.name"}
    assert code == (1 if undecided else 0)
    chosen = re.sub(rf"^.*  # {system}'s default\n", "", (tmp_path / "run.toml").read_text(), flags=re.MULTILINE)
    assert {name: table for name, table in tomllib.loads(chosen).items() if table} == tomllib.loads(ours)


def test_every_system_that_is_read_can_be_named() -> None:
    choices, _ = get_args(get_type_hints(import_)["system"])
    assert [*get_args(choices)] == import_config._NAMES


# The names of SGLang 0.5 (function_call_parser.py) and vLLM 0.24 (tool_parsers/__init__.py).
PARSERS = """apertus2509 cohere_command4 deepseekv3 deepseekv31 deepseekv32 deepseekv4 dots glm glm45 glm47 gpt-oss kimi_k2 kimi_k3
lfm2 llama3 mimo minicpm5 mistral muse poolside_v1 pythonic qwen qwen25 qwen3_coder spark25 step3 step3p5 minimax-m2 minimax-m3
trinity interns1 hermes hunyuan gigachat3 gemma4 inkling
deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 cohere_command3 ernie45 granite-20b-fc granite granite4 hunyuan_a13b hy_v3
internlm jamba llama3_json llama4_json llama4_pythonic longcat minimax_m2 minimax_m3 olmo3 openai phi4_mini_json qwen3_xml seed_oss
xlam functiongemma apertus solar_open2"""


@pytest.mark.parametrize("name", PARSERS.split())
def test_every_parser_of_sglang_and_vllm_has_a_format_or_a_decision(name: str) -> None:
    said = agentrl_environment(8, {"tool_call_parser": name}).text
    named = re.search(r'answer_format = "(\w+)"', said)
    assert ANSWER_FORMATS.find(named[1]) if named else f"its answer_format for {name}, which is one of your own" in said


EQUAL: dict[str, Any] = tomllib.loads((FILES / "equality.toml").read_text())


@pytest.mark.parametrize(("system", "name"), [(system, name) for system in EQUAL for name in EQUAL[system]["config"]])
def test_a_run_file_does_what_the_source_does(
    system: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At least 30 properties of each configuration are those of its system, defaults included, or there is a decision."""
    of_system, of_config = EQUAL[system], EQUAL[system]["config"][name]
    given = dict(pair.split("=", 1) for pair in f"{of_system['every']} {of_config['given']}".split())
    equals, sign, before = ("=", " ", "python3 -m verl.trainer.main_ppo ") if system == "verl" else (": ", "\n", "")
    file = tmp_path / ("a.sh" if before else "a.yaml")
    file.write_text(before + sign.join(f"{key}{equals}{value}" for key, value in given.items()))
    _, report = imported(file, tmp_path / "run.toml", "--from", system, capsys=capsys)
    assert [one["key"] for one in report["keys"] if one["kind"] in ("decide", "unknown")] == of_config.get("open", [])
    refused = of_config.get("refused", [])
    expected = of_system["does"] | of_config["does"]
    effective = import_config._effective({key: v for key, v in report["settings"].items() if key not in refused})
    assert len(expected) >= 30
    assert {key: effective.get(key, "absent") for key in expected} == {
        key: None if v == "unset" else v for key, v in expected.items()
    }


def test_what_a_whole_configuration_repeats_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An engine that is off stays off, and the defaults without an effect are counted; a changed one is reported."""
    whole = json.loads((FILES / "trl_whole.json").read_text())
    file = tmp_path / "whole.json"
    file.write_text(json.dumps({**whole, "eval_delay": 3}))
    _, report = imported(file, tmp_path / "run.toml", capsys=capsys)
    assert not any(key.startswith(("worker.", "vllm.")) for key in report["settings"])
    lines = {one["key"]: one["kind"] for one in report["keys"]}
    assert lines["eval_delay"] == "unknown"
    assert "do_train" not in lines
    (rest,) = (key for key in lines if key.endswith(" other keys"))
    assert int(rest.split()[0]) > 150


def test_what_a_silent_file_means_there_is_written_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other system's defaults that hold otherwise here are in the run file, each with the words whose default it is."""
    to = tmp_path / "run.toml"
    _, report = imported(FILES / "verl_grpo.sh", to, capsys=capsys)
    silent = {one["key"].rpartition(".")[2]: one["text"] for one in report["keys"] if one["kind"] == "silent"}
    assert silent["betas"] == "trainer.betas = [0.9, 0.999]; without it [0.9, 0.95]"
    assert "betas = [0.9, 0.999]  # verl's default" in to.read_text()
    load_all([to], [], {})


def test_a_reward_function_is_named_by_file_and_called_with_its_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, to = tmp_path / "run.yaml", tmp_path / "run.toml"
    named = "actor_rollout_ref: {model: {path: m}}\ncustom_reward_function: {path: my/tilt.py, name: score}\n"
    file.write_text(named)
    imported(file, to, capsys=capsys)
    assert tomllib.loads(to.read_text())["reward"] == {"name": "my/tilt.py:score"}
    file.write_text(named.replace("score}", "score, reward_kwargs: {bonus: 0.5, words: [a], off: null}}"))
    to.unlink()
    imported(file, to, capsys=capsys)
    reward = tomllib.loads(to.read_text())["reward"]
    part = {"reward": "my/tilt.py:score", "parameters": {"bonus": 0.5, "words": ["a"]}}
    assert reward == {"name": "my_tilt", "define": {"my_tilt": {"parts": {"tilt": part}}}}
    load_all([to], [], {})


def test_arguments_of_a_reward_function_without_its_file_need_a_decision(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are not dropped in silence; what verl's examples write for its own layout is no question."""
    file = tmp_path / "run.sh"
    file.write_text(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=2 +custom_reward_function.reward_kwargs.scale=2 actor_rollout_ref.actor.strategy=fsdp "
        "actor_rollout_ref.model.use_shm=false reward_model.reward_manager=naive actor_rollout_ref.model.path=m data.train_files=d.parquet"
    )
    _, report = imported(file, tmp_path / "run.toml", capsys=capsys)
    lines = {one["key"]: one for one in report["keys"]}
    kwarg = lines.pop("custom_reward_function.reward_kwargs.scale")
    assert kwarg["kind"] == "decide"
    assert "scale=VALUE" in kwarg["text"]
    assert [key for key, one in lines.items() if one["kind"] in ("decide", "unknown")] == []


def test_every_key_of_a_file_is_in_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.json"
    file.write_text(
        json.dumps({"num_generations": 8, "top_p": 0.9, "beta": 0.0, "tf32": None, "hub_token": "s3cret", "odd": 1})
    )
    code, report = imported(file, tmp_path / "r.toml", "--from", "trl", capsys=capsys)
    found = {one["key"]: one["kind"] for one in report["keys"]}
    assert found == {
        "num_generations": "taken", "top_p": "decide", "beta": "ignored", "tf32": "ignored", "hub_token": "ignored",
        "odd": "unknown", "model.path": "decide", "max_prompt_length": "silent", "generation and training in turns": "silent", "GRPOTrainer": "silent", "gradient_checkpointing": "silent", "adam_beta2": "silent",
        "lr_scheduler_type": "silent", "max_completion_length": "silent", "num_train_epochs": "silent", "bf16": "silent",
        "seed": "silent", "per_device_train_batch_size": "translated", "data.train": "decide", "reward.name": "decide",
    }  # fmt: skip
    assert code == 1
    assert "s3cret" not in json.dumps(report)
    assert "FOLDER-OF-THE-MODEL" in (tmp_path / "r.toml").read_text()


def test_the_text_of_the_report_leads_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Decisions first, then the rest, then the next commands; passwords in URLs are masked."""
    assert run(["config", "import", str(FILES / "agentrl.sh"), "--to", str(tmp_path / "a.toml")]) == 1
    text = capsys.readouterr().out
    assert "translated (" in text
    assert "pwd" not in text
    assert f"penstock train {tmp_path / 'a.toml'}" in text
    assert run(["config", "import", str(FILES / "verl_sft.sh"), "--to", str(tmp_path / "b.toml")]) == 1
    text = capsys.readouterr().out
    assert text.index("needs a decision (1)") < text.index("taken (")
    assert "sft.epochs = 3" in text
    assert f"penstock sft {tmp_path / 'b.toml'}" in text


def test_variables_of_a_wrapper_are_keys_when_the_system_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["config", "import", str(FILES / "wrapper.sh"), "--to", str(tmp_path / "a.toml")]) == 2
    assert "name the system with --from" in capsys.readouterr().err
    assert not (tmp_path / "a.toml").exists()
    code, report = imported(FILES / "wrapper.sh", tmp_path / "b.toml", "--from", "verl", capsys=capsys)
    assert code == 1
    assert report["settings"]["rollout.groups_per_step"] == 256
    assert report["settings"]["algorithm.kl_coefficient"] == 0.001


@pytest.mark.parametrize("order", [1, -1])
def test_limits_are_raised_and_the_narrower_key_holds(
    order: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What follows from the lengths and the staleness of the file is set; eps_clip_high overrules eps_clip in any order."""
    given = {
        "hf_checkpoint": "m", "eps_clip": 0.1, "eps_clip_high": 0.28, "rollout_max_response_len": 20000, "rollout_max_prompt_len": 500,
        "rollout_batch_size": 320, "global_batch_size": 256, "n_samples_per_prompt": 8, "rollout.max_staleness": 9,
    }  # fmt: skip
    file = tmp_path / "job.json"
    file.write_text(json.dumps(dict(list(given.items())[::order])))
    _, report = imported(file, tmp_path / "r.toml", "--from", "slime", capsys=capsys)
    settings = report["settings"]
    assert (settings["algorithm.clip_low"], settings["algorithm.clip_high"]) == (0.1, 0.28)
    assert settings["trainer.micro_batch_tokens"] == 20500
    assert (settings["rollout.max_staleness"], settings["trainer.keep_versions"]) == (9, 11)
    assert (settings["rollout.groups_per_step"], settings["algorithm.minibatches"]) == (320, 10)


@pytest.mark.parametrize(
    ("system", "given", "expected"),
    [
        ("trl", {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 6}, (6, 3, None)),
        ("trl", {"per_device_train_batch_size": 8, "generation_batch_size": 32, "num_iterations": 2}, (4, 4, 2)),
        ("trl", {"generation_batch_size": 32, "num_iterations": 1}, (4, 4, None)),
        ("openrlhf", {"rollout_batch_size": 32, "train_batch_size": 64, "n_samples_per_prompt": 8, "max_epochs": 2}, (32, 4, 2)),
        ("slime", {"rollout_batch_size": 32, "n_samples_per_prompt": 8, "num_steps_per_rollout": 4}, (32, 4, None)),
    ],
)  # fmt: skip
def test_several_optimizer_steps_on_a_batch_are_taken(
    system: str,
    given: dict[str, Any],
    expected: tuple[int | None, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Prompts that are generated together are a batch, and its optimizer steps and passes are those of the file."""
    file = tmp_path / "job.json"
    file.write_text(json.dumps(given))
    _, report = imported(file, tmp_path / "r.toml", "--from", system, capsys=capsys)
    keys = ("rollout.groups_per_step", "algorithm.minibatches", "algorithm.epochs")
    assert tuple(report["settings"].get(key) for key in keys) == expected


_O = "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --prompt_data d --n_samples_per_prompt 8 --advantage_estimator"
_S = "--hf-checkpoint m --prompt-data d --n-samples-per-prompt 8 --rollout-batch-size 8 --kl-coef 0.1 --kl-loss-coef 0.01"
_T = "trl grpo --model_name_or_path m --dataset_name d --use_vllm"
_V = "python3 -m verl.x algorithm.adv_estimator=grpo actor_rollout_ref.model.path=Qwen2.5-VL-7B data.train_files=d actor_rollout_ref.rollout.n=4 actor_rollout_ref.hybrid_engine=False"


@pytest.mark.parametrize(("command", "expected"), [
    (f"{_O} reinforce", "advantage=reinforce_pp loss=ppo_clip aggregation=token-mean max_staleness=0 groups_per_step=1024 minibatches=64"),
    (f"{_O} rloo --train.async_enable --train.async_queue_size 3", "advantage=rloo aggregation=token-mean max_staleness=3"),
    (f"{_O} dr_grpo --use_kl_loss", "aggregation=token-mean kl_coefficient=0.01 kl_form=k1 reward_kl_coefficient=0.0"),
    (f"{_O} group_norm --actor.policy_loss_type gspo", "advantage=grpo loss=gspo aggregation=seq-mean-token-mean clip_low=0.2"),
    (f"python3 train.py {_S}", "max_staleness=0 kl_coefficient=0.0 reward_kl_coefficient=0.0"),
    (f"python3 train_async.py {_S} --update-weights-interval 2 --use-kl-loss", "max_staleness=2 kl_coefficient=0.01 kl_form=k1"),
    (f"{_T} --use_peft", "importance=sequence importance_bound=mask importance_high=3.0 dropout=0.05 targets=['q_proj', 'v_proj']"),
    (f"{_T} --vllm_importance_sampling_correction false", "ratio_anchor=auto dropout=0.0"),
    (_V, "max_staleness=1 train_vision_tower=True"),
    (f"{_V} actor_rollout_ref.actor.freeze_vision_tower=True data.train_batch_size=0 actor_rollout_ref.actor.ppo_mini_batch_size=32 "
     "async_training.require_batches=4 async_training.staleness_threshold=0.5 rollout.total_rollout_steps=51200",
     "max_staleness=5 groups_per_step=128 minibatches=4 steps=400 train_vision_tower=False"),
    ("torchrun main.py --loss_calculater MINIRL --model_name_or_path m", "loss=minirl aggregation=token-mean max_new_tokens=8196"),
])  # fmt: skip
def test_what_other_code_does_beside_its_keys_is_in_the_run_file(
    command: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Estimators with their loss and mean, batches ahead, switches that are off, defaults of adapters, encoders and engines."""
    file = tmp_path / "a.sh"
    file.write_text(command)
    _, report = imported(file, tmp_path / "r.toml", capsys=capsys)
    does = {key.rpartition(".")[2]: str(value) for key, value in import_config._effective(report["settings"]).items() if key[:2] in ("al", "mo", "ro", "tr")}  # fmt: skip
    assert does | dict(pair.split("=") for pair in re.split(r" (?=\w+=)", expected)) == does


def test_supervised_epochs_are_no_passes_over_a_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sft.sh"
    file.write_text("deepspeed --module openrlhf.cli.train_sft --max_epochs 3 --pretrain m --dataset d.jsonl\n")
    _, report = imported(file, tmp_path / "r.toml", capsys=capsys)
    assert "algorithm.epochs" not in report["settings"]
    assert report["settings"]["sft.epochs"] == 3


def test_an_existing_file_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = tmp_path / "run.toml"
    to.write_text("mine")
    assert run(["config", "import", str(FILES / "agentrl.sh"), "--to", str(to)]) == 2
    assert to.read_text() == "mine"
    assert "--to" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.yaml", "a: !!python/object/apply:os.system ['touch x']", "not valid YAML"),
        ("a.yaml", "- 1", "expected keys with values, got list"),
        ("a.yaml", "a: [", "not valid YAML"),
        ("a.json", "{", "not valid JSON"),
        ("a.py", "lr = 1", "not a YAML, JSON or shell file"),
        ("a.sh", "python train.py --a 'open", "a.sh:1: not a readable shell command"),
        ("a.sh", "ls", "no key of verl"),
        ("a.sh", "./train.sh --rollout_n 8 --epochs 3", "keys that several of verl"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error(
    name: str, content: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(content)
    assert run(["config", "import", str(tmp_path / name), "--to", str(tmp_path / "run.toml")]) == 2
    assert words in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_shell_variables_are_substituted_and_nothing_is_executed(tmp_path: Path) -> None:
    """Assignments, defaults, arithmetic, arrays, quotes; what comes from elsewhere is marked."""
    target = tmp_path / "executed"
    found = read_shell(
        "a.sh",
        f"""
        export N=4  # a comment
        LEN=$((N * 2 + 1))
        declare -r BIG=$((1024 * (N + 1)))
        NAME="run-${{N}}"
        WHEN=$(touch {target}; date)
        MORE=(--flag --list 1 2
          # in between
          --text "two words")
        MORE+=(--last $LEN)
        if [ -z "$X" ]; then echo no; fi
        python -c 'print(1)' --never 1
        CUDA_VISIBLE_DEVICES=0 torchrun --nproc_per_node=$N train.py "${{MORE[@]}}" a.b=$NAME a.c='$N' \\
           a.d=${{OTHER:-7}} a.e=$HOME/x a.f=$WHEN ++a.g=[x,"y"] a.h=$BIG --a.i=`date` $1 > log.txt 2>&1 --after 3
        """,
    )
    marks = {key: re.sub("\ue001", "|", str(value)) for key, value in found.values.items()}
    assert marks == {
        "nproc_per_node": "4", "flag": "True", "list": "[1, 2]", "text": "two words", "last": "9", "a.b": "run-4", "a.c": "$N",
        "a.d": "7", "a.e": f"{Path.home()}/x", "a.f": "|$(...)|", "a.g": "['x', 'y']", "a.h": "5120", "a.i": "|$(...)|",
    }  # fmt: skip
    assert not target.exists()


def test_a_script_is_read_over_its_quotes_texts_and_files() -> None:
    """Quotes over lines, an apostrophe in a comment, a text that becomes a variable, words of an unquoted one, a sourced file."""
    found = read_shell(
        "a.sh",
        """
        DIR="$(cd -- "$(dirname -- "$0")" && pwd)"
        source "${DIR}/models/m.sh"  # it's the model
        ENV="{
          \\"A\\": \\"it's\\"
        }"
        OPTS="
            a.b=1 \\
            a.c=2"
        read -r -d '' training <<EOF
openrlhf.cli.train_sft \\
   --data.max_len 7
EOF
        cat > other.sh <<'END'
python never.py --no 'a quote that does not end
END
        deepspeed --module $training ${SHAPE[@]} ${ELSEWHERE[@]} $OPTS --env "$ENV" --text "$OPTS"
        """,
        {"models/m.sh": "SHAPE=(--layers 2)\n"}.get,
    )
    text = found.values.pop("text")
    assert found.values == {
        "module": "openrlhf.cli.train_sft", "data.max_len": 7, "layers": 2, "elsewhere": "\ue001ELSEWHERE\ue001", "a.b": 1, "a.c": 2,
        "env": found.values["env"],
    }  # fmt: skip
    assert "it's" in found.values["env"]
    assert text.split() == ["a.b=1", "a.c=2"]


def test_of_the_choices_in_a_script_the_part_is_read_that_its_variables_choose() -> None:
    """An argument loop leaves the defaults; a test of what is not assigned finds nothing; a launcher may stand before the program."""
    found = read_shell(
        "a.sh",
        """
        backend=fsdp; LR=1e-6  # a; python never.py --no 1
        while [[ $# -gt 0 ]]; do
          case $1 in
            --lr) LR="$2"; shift 2 ;;
          esac
        done
        case "$backend" in megatron) ARGS=a.tp=4 ;; fsdp | fsdp2) ARGS=a.zero=3 ;;
          *) ARGS=a.other=1
        esac
        if [[ $backend == "megatron" ]]; then NAME=first
        elif [ "$backend" = fsdp ]; then
            if [ 8 -gt 9 ]; then NAME=second; else NAME=third; fi
        else
            NAME=fourth
        fi
        if [ -n "$KEY" ]; then LOG=(--use-wandb); else LOG=(); fi
        [ "$NAME" = first ] && NAME=fifth
        srun -w "$host" bash -c "cd /o; pip install . && python3 -m verl.trainer.main_ppo a.lr=$LR a.name=$NAME $ARGS ${LOG[@]}"
        """,
    )
    assert found.values == {"a.lr": 1e-6, "a.name": "third", "a.zero": 3}


def test_the_defaults_of_a_hydra_configuration_have_its_order_and_packages() -> None:
    """``_self_`` overrules what stands before it; a group is its own package; a file may be empty, and name others, itself too."""
    beside = {
        "first.yaml": "a: 1\nb: 1\n",
        "empty.yaml": "# nothing yet\n",
        "last.yaml": "b: 3\n",
        "actor/dp.yaml": "defaults: [../optim@optim: fsdp, ../actor/dp, _self_]\nlr: 2\n",
        "actor/../optim/fsdp.yaml": "clip: 1.0\n",
    }
    found = read_yaml(
        "x.yaml",
        "defaults: [first, empty, _self_, last, actor@role.actor: dp, actor/dp, model: null]\na: 2\nb: 2\n",
        beside.get,
    )
    assert found.values == {
        "a": 2, "b": 3, "defaults": [{"model": None}],
        **{f"{package}.{key}": value for package in ("role.actor", "actor")
           for key, value in (("defaults", ["../actor/dp"]), ("optim.clip", 1.0), ("lr", 2))},
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"last\.yaml of its defaults: expected keys with values, got list"):
        read_yaml("x.yaml", "defaults: [last]\n", {"last.yaml": "[1]\n"}.get)


def test_references_between_keys_of_a_yaml_file_are_resolved() -> None:
    """Absolute, relative and with a default; a reference to nothing is marked, a circle ends."""
    found = read_yaml(
        "a.yaml",
        "a: 5\nb: ${a}\nc: {d: 'x-${b}', e: '${.d}', f: '${oc.select:no.key,7}'}\ng: ${nowhere}\nh: ${i}\ni: ${h}\nj: 1e-6",
    )
    assert {key: found.values[key] for key in ("b", "c.d", "c.e", "c.f", "j")} == {
        "b": 5, "c.d": "x-5", "c.e": "x-5", "c.f": "7", "j": 1e-6,
    }  # fmt: skip
    assert found.values["g"] == "\ue001nowhere\ue001"
    with ends_within(20.0):  # tables that hold one another, and many that hold one
        found = read_yaml("c.yaml", "a: {x: '${b}', y: 1}\nb: {x: '${a}', z: 2}\nt: {k: 3}\n" + "".join(f"t{n}: ${{t}}\n" for n in range(3000)))  # fmt: skip
    assert (found.values["a.x.z"], found.values["t2999.k"]) == (2, 3)
    with pytest.raises(ConfigError):
        read_yaml("b.yaml", "a: b: c")
