"""The table of shapes that a template continues without changing what stands before."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.agents.proxy.agent_model import TEMPLATES, write_model

from penstock.agents.proxy.__main__ import main
from penstock.agents.proxy.renderer import ChatRenderer, format_table, probe, shows_tools
from penstock.protocol.chat_tokenizer import ChatTokenizer


def renderer(folder: Path, template: str) -> ChatRenderer:
    return ChatRenderer(ChatTokenizer.read(write_model(folder, TEMPLATES[template])))


@pytest.mark.parametrize(
    ("template", "not_append_only", "knows_tools"),
    [
        ("smollm2", set(), False),
        ("qwen25", set(), True),
        (
            "qwen3",
            {
                "answer, then user",
                "reasoning and answer, then user",
                "call, then result",
                "text and call, then result",
                "two calls, then two results",
                "call, then result and user",
                "call, then user",
            },
            True,
        ),
        ("rewrites", set(), True),
    ],
)
def test_the_shapes_of_a_template(tmp_path: Path, template: str, not_append_only: set[str], knows_tools: bool) -> None:
    made = renderer(tmp_path, template)
    reports = probe(made)
    assert {report.shape for report in reports if not report.append_only} == not_append_only
    assert all(report.has_bridge for report in reports)
    assert all(report.same_bridge for report in reports if report.append_only)
    assert shows_tools(made) is knows_tools


def test_the_table_names_what_is_refused_and_what_has_no_bridge(tmp_path: Path) -> None:
    table = format_table(probe(renderer(tmp_path, "llama")))
    assert "two calls, then two results      refused" in table
    assert "answer, then user                yes" in table
    table = format_table(probe(renderer(tmp_path / "other", "repeats")))
    assert "rendering again: a row for each" in table


def test_the_command_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_model(tmp_path / "model", TEMPLATES["qwen3"])
    assert main([str(folder)]) == 0
    assert "The template shows tools." in capsys.readouterr().out
    assert main([str(folder), "--require-append-only"]) == 1
    assert main([str(write_model(tmp_path / "other", TEMPLATES["qwen25"])), "--require-append-only"]) == 0
    assert main([str(tmp_path / "nothing")]) == 1
    assert "no such folder" in capsys.readouterr().err
