"""An agent of openai-agents and tools of an MCP server, trained for a step by the real services with a tiny model; ``make test-more NAME=environments``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agents.proxy.agent_model import QWEN25, write_model
from tests.servers import require

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(
        "PENSTOCK_TEST_ENVIRONMENTS" not in os.environ,
        reason="make test-more NAME=environments sets PENSTOCK_TEST_ENVIRONMENTS",
    ),
    pytest.mark.timeout(600),
]
SERVER = ROOT / "tests" / "agents" / "environments" / "adapters" / "tool_server.py"
DEFINED = {
    "dictionary": f"""
        type = "program"
        options = {{ command = ["{sys.executable}", "{ROOT}/examples/dictionary_agent.py"], variables = {{ OPENAI_AGENTS_DISABLE_TRACING = "1" }} }}
    """,
    "notes": f"""
        type = "mcp"
        options = {{ reward_tool = "judge", servers.notes = {{ command = ["{sys.executable}", "{SERVER}"] }} }}
    """,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Random weights below a template that knows tools."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = write_model(tmp_path / "model", QWEN25)
    ends = json.loads((folder / "config.json").read_text())["eos_token_id"]
    torch.manual_seed(0)
    size = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    config = Qwen2Config(
        vocab_size=440, max_position_embeddings=8192, eos_token_id=ends, tie_word_embeddings=True, **size
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("environment", sorted(DEFINED))
def test_a_step_is_trained(environment: str, model: Path, tmp_path: Path, run_id: str) -> None:
    require("nats-server")
    require("rclone")
    rows = [{"prompt": [{"role": "user", "content": "what is sun"}], "ground_truth": "star"}] * 4
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        f"""
        run = {{ id = "{run_id}", dir = "{tmp_path}/runs" }}
        model = {{ path = "{model}" }}
        data = {{ train = "{tmp_path}/rows.jsonl", max_prompt_tokens = 64 }}
        rollout = {{ groups_per_step = 2, group_size = 2, max_new_tokens = 12, environment = "{environment}" }}
        reward = {{ name = "environment" }}
        trainer = {{ steps = 1, lr = 1e-4 }}
        [environment.define.{environment}]
        {DEFINED[environment]}
        """
    )
    words = [sys.executable, "-m", "penstock", "train", str(run_file), "--local", "--workers", "1", "--json"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 1
    folder = tmp_path / "runs" / run_id
    assert json.loads((folder / "trainer.json").read_text())["groups"]["trained"] == 2
    audit = subprocess.run(
        [sys.executable, "-m", "penstock", "audit", run_id, f"run.dir={tmp_path}/runs"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert audit.returncode == 0, audit.stdout + audit.stderr
