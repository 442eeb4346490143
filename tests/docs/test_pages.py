"""The documentation: what its pages name exists, and every block of commands says whether `make docs-test` runs it."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TypeGuard

import pytest
from docs import generate, schemas
from docs.self_contained import loads

from penstock.console.cli.main import app
from penstock.console.report import diagnoses as rules
from penstock.protocol import hardware_errors
from penstock.protocol.command_line import arguments_of
from penstock.protocol.config.foreign_config import ABSENT, ALIASES, RENAMED
from penstock.protocol.config.schema_keys import SECTIONS
from tests.docs.pages import PAGES, READMES, ROOT, Block, blocks, inline_code, penstock_commands

_KEY = re.compile(rf"^({'|'.join(SECTIONS)})\.[a-z_]+(\.[a-z_]+)*$")
_OPEN = ("reward.define.", "reward.by_source.", "reward.success.", "data.map.", "sft.map.", "dpo.map.", "rm.map.", "eval.map.", "data.roles.", "data.template_arguments.", "algorithm.options.", "worker.engine_options.", "sglang.environ.", "vllm.environ.")  # fmt: skip
FOREIGN = ALIASES.keys() | RENAMED.keys() | ABSENT.keys()  # of other systems: the settings loader has an answer
_NO_KEYS = (".py", ".md", ".json", ".jsonl", ".conf", ".toml")  # files named like a section
_VERBS = {" ".join(words) for words, _ in generate.verbs()}
_PATHS = re.compile(r"^(?:docs|protocol|serving|trainer|fine_tuning|rollout_service|agents|reward_service|sandbox|reward_model|console|deploy|forensics|benchmarks|tests|examples)/[\w./-]+\.(?:py|md|toml|json|yaml|conf|mjs|txt)$")  # fmt: skip


def test_every_block_of_commands_is_marked():
    found = [block for page in PAGES for block in blocks(page)]
    assert [block.where for block in found if block.is_shell and block.mark not in {"run", "not run"}] == []
    assert [block.where for block in found if block.mark == "not run" and not block.note] == []


def test_every_command_has_its_verb_and_flags():
    """In blocks: the verb is one of the app's, each flag one of its own, or a setting."""
    wrong = []
    for where, given in (command for page in (*PAGES, *READMES) for command in penstock_commands(page)):
        verb, rest = app, list(given)
        while rest and rest[0] in verb:
            verb, rest = verb[rest[0]], rest[1:]
        if verb.default_command is None and not (verb is app and rest == ["--help"]):
            wrong.append(f"{where}: no such verb: {' '.join(given)}")
            continue
        own = {name for argument in arguments_of(verb) for name in argument.names}
        known = own | {"--help"}
        flags = [word.partition("=")[0] for word in rest if word.startswith("-") and not word.startswith("- ")]
        wrong += [f"{where}: {flag}" for flag in flags if flag not in known and not _is_key(flag.removeprefix("--"))]
    assert wrong == []


def test_every_setting_exists():
    """In commands, in TOML blocks, and in the text between back quotes."""
    wrong = []
    for page in (*PAGES, *READMES):
        given = {word.partition("=")[0] for _, line in penstock_commands(page) for word in line if _is_override(word)}
        given |= {flag[2:] for _, line in penstock_commands(page) for flag, _ in pairwise(line) if _KEY.match(flag[2:])}
        given |= {key for block in blocks(page) if block.language == "toml" for key in _toml_keys(block)}
        texts = [text for text in inline_code(page) if _is_override(text) or _KEY.match(text)]
        given |= {text.partition(" ")[0].partition("=")[0] for text in texts}
        wrong += [(page, key) for key in sorted(given) if not _is_key(key) and not key.endswith(_NO_KEYS)]
    assert wrong == []


def test_every_verb_and_file_in_the_text_exists():
    """`penstock …` and paths of the repository between back quotes."""
    found = [(page, text) for page in (*PAGES, *READMES) for text in inline_code(page)]
    assert [(page, text) for page, text in found if text.startswith("penstock ") and not _names_a_verb(text)] == []
    paths = [(page, text) for page, text in found if _PATHS.match(text) and not (ROOT / text).exists()]
    assert [(page, path) for page, path in paths if not (page.parent / path).exists()] == []


def test_every_link_leads_to_a_file_and_a_heading():
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path, _, anchor = target.partition("#")
            if "://" in path:
                continue
            file = (page.parent / path).resolve() if path else page
            if not file.exists() or (anchor and file.suffix == ".md" and anchor not in _anchors(file)):
                broken.append((page, target))
    assert broken == []


def test_every_known_failure_of_agents_has_its_test():
    """Each of the sixty cases is in the table, and each test and proof that it names exists."""
    rows = re.findall(
        r"^\| ([\d, to]+) \|.*\| `([^`]+)` \|$",
        (ROOT / "tests" / "agents" / "known_failures.md").read_text(),
        re.MULTILINE,
    )
    numbers = set[int]()
    for cases, name in rows:
        first, *rest = map(int, re.findall(r"\d+", cases))
        numbers |= set(range(first, rest[-1] + 1)) if " to " in cases else {first, *rest}
        if name.startswith("make "):
            continue  # tests/packaging/test_makefile.py looks for it
        file, _, function = name.partition("::")
        found = next(
            path for top in ("", "rollout_service", "agents") if (path := ROOT / "tests" / top / file).is_file()
        )
        assert f"def {function}(" in found.read_text(), name
    assert numbers == set(range(1, 61))


def test_every_linked_page_is_on_the_site():
    """A Markdown file that a page links to matches a pattern of docs/conf.py, and a README is in the contents; else `make docs` fails."""
    source = ast.parse((ROOT / "docs" / "conf.py").read_text(encoding="utf-8"))
    patterns: list[str] = next(
        ast.literal_eval(node.value) for node in source.body if _assigns(node, "include_patterns")
    )
    included = re.compile(
        "|".join(re.escape(pattern).replace(r"\*\*", ".*").replace(r"\*", "[^/]*") for pattern in patterns)
    )
    readmes = [page for page in READMES if page.relative_to(ROOT).parts[0] != "tests"]
    linked = {
        (page.parent / target).resolve().relative_to(ROOT)
        for page in (*PAGES, *readmes)
        for target in re.findall(r"\]\(([^)\s:#]+\.md)", page.read_text(encoding="utf-8"))
    }
    assert sorted(str(page) for page in linked if not included.fullmatch(str(page))) == []
    contents = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").splitlines()
    assert [page for page in readmes if f"../{page.relative_to(ROOT).with_suffix('')}" not in contents] == []


def test_quoted_messages_are_the_program_s():
    """The first column of the tables of messages in docs/troubleshooting.md; `…` stands for what changes."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
    assert len(quoted) >= 15
    messages = [*_messages(), *(situation["what"] for situation in hardware_errors.table()["situation"])]
    assert [one for one in quoted if not any(_contains(message, one) for message in messages)] == []


def test_every_generated_reference_has_a_page_and_every_mark_a_module():
    marks = {
        name for page in PAGES for name in re.findall(r"^<!-- generated: ([\w-]+) -->$", page.read_text(), re.MULTILINE)
    }
    assert marks == set(generate.NAMES)


def test_the_reference_has_every_verb_key_and_message():
    """Commands, settings and facts are read from the code that defines them."""
    assert {"train", "weights export", "dead-letters list", "reward serve"} <= _VERBS
    text = generate.text("settings")
    assert [key for key in schemas.all_keys() if f"`{key}`" not in text] == []
    assert {
        "trainer.lr",
        "model.lora.rank",
        "worker.engine",
        "reward_service.port",
        "algorithm.clip_low",
    } <= schemas.all_keys()
    assert all(tag in generate.text("facts") for tag in ("task_issued.v1", "group_scored.v1", "dead_letter.v1"))


def test_every_diagnosis_is_shown():
    """Each rule of the report has an example in docs/metrics.md."""
    shown = {one.key for run in generate.RUNS for one in generate.shown(run)}
    assert len(generate.RUNS) >= len(rules._RULES)
    source = ast.parse((ROOT / "console" / "report" / "diagnoses.py").read_text())
    keys = {word.value.value for node in ast.walk(source) if isinstance(node, ast.Call) for word in node.keywords if word.arg == "key" and isinstance(word.value, ast.Constant)}  # fmt: skip
    assert shown == keys


def test_every_package_of_the_site_is_pinned():
    """The extra `docs` is in constraints.txt, so that two builds are the same."""
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"]
    pinned = {line.partition("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert [name for name in (re.split(r"[<>=]", one)[0] for one in extra) if name not in pinned] == []


def test_images_load_nothing_and_have_both_colour_schemes():
    """Each picture is one SVG file without references to others, readable on light and dark pages."""
    for image in sorted((ROOT / "docs" / "images").glob("*.svg")):
        text = image.read_text(encoding="utf-8")
        assert "prefers-color-scheme: dark" in text, image.name
        assert re.findall(r"(?:href|src)=|@import|url\((?!#)", text) == [], image.name


@pytest.mark.parametrize(
    ("text", "loaded"),
    [
        ('<script defer src="https://cdn.example/x.js"></script>', ["https://cdn.example/x.js"]),
        ("<img alt='' src='//cdn.example/x.png'>", ["//cdn.example/x.png"]),
        ('<link rel="stylesheet" href="https://fonts.example/css">', ["https://fonts.example/css"]),
        ('@import "https://fonts.example/css";', ["https://fonts.example/css"]),
        ("a { background: url('http://x.example/y.png') }", ["http://x.example/y.png"]),
        ('import("https://cdn.example/m.mjs")', ["https://cdn.example/m.mjs"]),
        ('<a href="https://arxiv.org/abs/2505.24298">paper</a><script src="_static/x.js"></script>', []),
    ],
)
def test_what_a_built_page_loads_from_elsewhere_is_found(text: str, loaded: list[str]):
    """Scripts, images, style sheets, imports and urls of other hosts; not links that a reader follows."""
    assert list(loads(text)) == loaded


@cache
def _is_override(word: str) -> bool:
    return "=" in word and _KEY.match(word.partition("=")[0].strip()) is not None


@cache
def _keys() -> frozenset[str]:
    return frozenset(schemas.all_keys())


def _is_key(key: str) -> bool:
    tables = {one.rpartition(".")[0] for one in _keys()}
    return key in _keys() or key in tables or key in FOREIGN or key.startswith(_OPEN)


def _toml_keys(block: Block) -> set[str]:
    """Return the dotted keys of a TOML block that begin with a section of the run file."""

    def leaves(value: object, path: str) -> set[str]:
        if isinstance(value, dict) and value and path not in _keys():
            return {leaf for name, inner in value.items() for leaf in leaves(inner, f"{path}.{name}" if path else name)}
        return {path}

    found = leaves(tomllib.loads(block.text), "")
    return {key for key in found if key.partition(".")[0] in SECTIONS}


def _names_a_verb(text: str) -> bool:
    given = [word for word in text.split()[1:] if re.fullmatch(r"[a-z-]+", word)]
    return not given or any(" ".join(given[:n]) in _VERBS for n in (1, 2)) or (len(given) == 1 and given[0] in app)


@cache
def _anchors(page: Path) -> frozenset[str]:
    found = set()
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            title = re.sub(r"[`*]", "", line.lstrip("#").strip()).lower()
            found.add(re.sub(r"[^\w\- ]", "", title).replace(" ", "-"))
    return frozenset(found)


@cache
def _messages() -> tuple[str, ...]:
    found = []
    for folder in (
        "protocol",
        "serving",
        "trainer",
        "fine_tuning",
        "rollout_service",
        "agents",
        "reward_service",
        "sandbox",
        "console",
        "deploy",
        "forensics",
    ):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    found.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) > 10:
                    found.append(node.value)
    return tuple(found)


def _contains(message: str, quoted: str) -> bool:
    at = 0
    for piece in (piece.strip() for piece in quoted.split("…")):
        at = message.find(piece, at)
        if at < 0:
            return False
        at += len(piece)
    return True


def _assigns(node: ast.stmt, name: str) -> TypeGuard[ast.Assign]:
    return isinstance(node, ast.Assign) and any(
        isinstance(target, ast.Name) and target.id == name for target in node.targets
    )
