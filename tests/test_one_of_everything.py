"""Each primitive of the tree exists once: no second file renames, asks for the parent's death, or runs a loop in a thread."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_PACKAGES = (
    "agents", "client", "console", "deploy", "fine_tuning", "forensics", "protocol", "reward_model", "reward_service", "rollout_service", "sandbox", "serving", "trainer",
)  # fmt: skip
_WORDS = (
    "replace",
    "rename",
    "shutil.move",
    "PDEATHSIG",
    "is_loopback",
    "etry-",
    "event_loop",
    "Thread(",
    "retry_after_s(",
    "is not renewed: ",
    "was not unregistered: ",
    "press Ctrl-C again",
    "signing keys whsec_",
)  # no file without them is parsed
_RENAMES = {"os.replace", "os.rename", "os.renames", "shutil.move"}
_LOOPS = ("asyncio.run", "run_forever", "run_until_complete", "asyncio.Runner")
_MESSAGES = {  # what is hosted says one thing, where it is done
    "is not renewed: ": "renewal",
    "was not unregistered: ": "renewal",
    "press Ctrl-C again": "drain",
    "signing keys whsec_...": "option of keys",
}
_LIBRARIES = {"client", "_client", "js", "msg", "err", "sub", "_sub", "_store"}  # names of objects of nats-py and minio


def _primitive_of(node: ast.AST) -> str | None:
    match node:
        case ast.Call():
            return _primitive_of_call(node)
        case ast.Name(id=name) if name.endswith("SET_PDEATHSIG"):
            return "parent death"
        case ast.Constant(value=str(text)):
            return next((name for words, name in _MESSAGES.items() if words in text), None)
        case ast.FunctionDef(name="is_loopback" | "_is_loopback"):
            return "loopback"
        case ast.Subscript(slice=ast.Constant(value=str(key))) if key.lower() == "retry-after":
            return "Retry-After"
    return None


def _primitive_of_call(call: ast.Call) -> str | None:
    if isinstance(call.func, ast.Name) and call.func.id == "retry_after_s":
        return "wait for Retry-After"
    if not isinstance(call.func, ast.Attribute):
        return None
    match call.func.attr, call.args, call.keywords:
        case (("replace" | "rename"), [_], []):  # of a Path: that of a text has two arguments
            return "rename"
        case (("replace" | "rename" | "renames" | "move"), _, _) if ast.unparse(call.func) in _RENAMES:
            return "rename"
        case "get", [ast.Constant(value=str(key)), *_], _ if key.lower() == "retry-after":
            return "Retry-After"
        case "new_event_loop", _, _:
            return "loop of a thread"
        case "Thread", _, named:
            target = " ".join(ast.unparse(one.value) for one in named if one.arg == "target")
            return "loop of a thread" if any(loop in target for loop in _LOOPS) else None
    return None


@functools.cache
def _places() -> Mapping[str, set[str]]:
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in (path for package in _PACKAGES for path in (_ROOT / package).rglob("*.py")):
        text = path.read_text()
        if any(word in text for word in _WORDS):
            for node in ast.walk(ast.parse(text)):
                if (primitive := _primitive_of(node)) is not None:
                    found[primitive].add(path.relative_to(_ROOT).as_posix())
    return found


@pytest.mark.parametrize(
    ("primitive", "places"),
    [
        (
            "rename",
            {
                "protocol/files.py",
                "protocol/parent_death.py",  # a program that imports no package
                "fine_tuning/training_folder.py",  # moves what may be on another file system
            },
        ),
        ("parent death", {"protocol/parent_death.py", "sandbox/inside/confine.py"}),  # the second can import nothing
        ("loopback", {"protocol/transport/tls.py"}),
        ("Retry-After", {"serving/http_connections.py"}),
        # the second rests a server that is full
        ("wait for Retry-After", {"serving/http_connections.py", "agents/environments/over_http/servers.py"}),
        ("renewal", {"serving/hosting.py"}),
        ("drain", {"serving/hosting.py"}),
        ("option of keys", {"protocol/command_line.py"}),
        ("loop of a thread", {"protocol/transport/loop_thread.py"}),
    ],
)
def test_a_primitive_is_in_one_file(primitive: str, places: set[str]) -> None:
    """A second copy would decide on its own about fsync, deadlines or names; an exception has its reason above."""
    assert _places()[primitive] == places


def test_no_private_name_of_a_library_is_used() -> None:
    """The clients of NATS and S3 are used by their public interfaces, so that their next releases work."""
    found = []
    for path in (_ROOT / "protocol" / "transport").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and {"Client", "Subscription", "Minio"} & {*map(ast.unparse, node.bases)}:
                found.append(f"{path.name}: class {node.name}")
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                of = ast.unparse(node.value)
                found += [f"{path.name}: {of}.{node.attr}"] if of.rpartition(".")[2] in _LIBRARIES else []
    assert found == []


def test_errors_are_printed_without_secrets_and_without_control_characters() -> None:
    """Errors name what was sent and answered; each print of one to standard error is an `error_text`."""
    prints = re.compile(
        r'(?:print|stderr\.write)\((?:scrub\(|f"[^\n]*\{(?:err|error|problem|why)\}[^\n]*(?:file=sys\.stderr\)|\\n"))'
    )
    files = (file for package in _PACKAGES for file in (_ROOT / package).rglob("*.py"))
    assert [str(file.relative_to(_ROOT)) for file in files if prints.search(file.read_text(encoding="utf-8"))] == []
