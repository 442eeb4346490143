"""Every Python process that a service or the command starts leaves the working directory out of its import path."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.packaging.conftest import OURS, ROOT

_SAFE = ("-P", "-I")  # safe path; isolated, which implies it

_WORDS = ("executable", "interpreter()", "'-m'", '"-m"')  # one of them is in each file that starts a Python

# Servers of another project, whose Python may be older than -P: PYTHONSAFEPATH in their environment does the same.
_FOREIGN = ("sglang.launch_server", "vllm.entrypoints.cli.main")


def command_lines(source: str) -> Iterator[str]:
    """Yield each list, tuple or call that starts a Python with flags, or a module, without a flag of ``_SAFE``."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Call(args=items):
                pass
            case _:
                continue
        words = [ast.unparse(item) for item in items]
        literals = [item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)]
        module = literals.index("-m") if "-m" in literals else len(literals)
        python = any(word.endswith(("sys.executable", "interpreter()")) for word in words)
        starts = module < len(literals) or (python and any(word.startswith("-") for word in literals))
        if starts and not any(flag in _SAFE for flag in literals[:module]) and not set(_FOREIGN) & set(literals):
            yield ast.get_source_segment(source, node) or ast.unparse(node)


def test_every_python_process_starts_with_a_safe_path():
    """Every command with ``sys.executable`` or -m has -P or -I before it."""
    files = sorted(file for name in OURS[1:] for file in (ROOT / name).rglob("*.py"))
    texts = {str(file): file.read_text(encoding="utf-8") for file in files}
    starting = {file: text for file, text in texts.items() if any(word in text for word in _WORDS)}
    assert {file: line for file, text in starting.items() for line in command_lines(text)} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("run([sys.executable, '-m', 'penstock'])", 1),
        ("start(sys.executable, '-m', module)", 1),
        ("[*before, '-m', name]", 1),
        ("[sys.executable, '-c', code]", 1),
        ("[sys.executable, '-P', '-m', 'penstock']", 0),
        ("[sys.executable, '-I', '-S', str(path)]", 0),
        ("[sys.executable, '-m', 'penstock', '-P']", 1),
        ("Path(sys.executable).with_name('nats-server')", 0),
    ],
)
def test_the_search_finds_what_it_should(source: str, found: int):
    """A command line counts when it starts a Python, and is safe only with the flag in front of the module."""
    assert len(list(command_lines(source))) == found


def test_the_images_start_with_a_safe_path():
    for file in (ROOT / "deploy" / "docker").glob("*.Dockerfile"):
        lines = [line for line in file.read_text().splitlines() if line.startswith("ENTRYPOINT")]
        assert lines == ['ENTRYPOINT ["python", "-P", "-m"]'], file
