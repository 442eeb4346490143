"""An agent of openai-agents and tools of an MCP server, trained for a step by the real services with a tiny model; ``make test-more NAME=environments``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.agents.proxy.agent_model import QWEN25, write_model
from tests.servers import require
from tests.small_run import report_of, train_local, write_run_file

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(
        "PENSTOCK_TEST_ENVIRONMENTS" not in os.environ,
        reason="make test-more NAME=environments sets PENSTOCK_TEST_ENVIRONMENTS",
    ),
    pytest.mark.timeout(600),
]
SERVER = ROOT / "tests" / "agents" / "environments" / "adapters" / "tool_server.py"
DEFINED: dict[str, dict[str, Any]] = {
    "dictionary": {
        "type": "program",
        "options": {
            "command": [sys.executable, f"{ROOT}/examples/dictionary_agent.py"],
            "variables": {"OPENAI_AGENTS_DISABLE_TRACING": "1"},
        },
    },
    "notes": {
        "type": "mcp",
        "options": {"reward_tool": "judge", "servers": {"notes": {"command": [sys.executable, str(SERVER)]}}},
    },
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
    run_file = write_run_file(
        tmp_path,
        run_id,
        model={"path": str(model)},
        data={"train": str(tmp_path / "rows.jsonl"), "max_prompt_tokens": 64},
        rollout={"groups_per_step": 2, "group_size": 2, "max_new_tokens": 12, "environment": environment},
        reward={"name": "environment"},
        trainer={"steps": 1},
        environment={"define": {environment: DEFINED[environment]}},
    )
    assert train_local(run_file)["steps"] == 1
    folder = tmp_path / "runs" / run_id
    assert json.loads((folder / "trainer.json").read_text())["groups"]["trained"] == 2
    assert report_of("audit", run_id, tmp_path / "runs")["closes"]
