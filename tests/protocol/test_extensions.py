"""Extensions by name: built in, import path, file, entry point; each with a digest, each refusal with a fix."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.protocol.errors import ConfigError
from penstock.protocol.extensions import Registry


@dataclass(frozen=True)
class Shape:
    """The kind of extension of these tests."""

    name: str
    sides: int


PACKAGE = {
    "__init__": "",
    "square": "from tests.protocol.test_extensions import Shape\nsquare = Shape('square', 4)\n",
    "triangle": "from tests.protocol.test_extensions import Shape\ntriangle = Shape('triangle', 3)\n",
    "round/__init__": "",
    "round/small/__init__": "",
    "round/small/dot": "from tests.protocol.test_extensions import Shape\ndot = Shape('dot', 0)\n",
}


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Registry[Shape]:
    """A registry over a package of two files and one installed distribution with an entry point."""
    package = f"shapes_{abs(hash(request.node.name))}"
    folder = tmp_path / "site" / package
    folder.mkdir(parents=True)
    for name, text in PACKAGE.items():
        (folder / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.py").write_text(text)
    installed = tmp_path / "site" / "extra_shapes.py"
    installed.write_text("from tests.protocol.test_extensions import Shape\npenta = Shape('pentagon', 5)\n")
    info = tmp_path / "site" / "extra_shapes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extra-shapes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[penstock.test_shapes]\npentagon = extra_shapes:penta\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "extra_shapes", raising=False)
    return Registry("shape", Shape, package=package, group="penstock.test_shapes")


def test_every_file_of_the_package_is_found(registry: Registry[Shape]) -> None:
    assert registry.names() == ("dot", "pentagon", "square", "triangle")
    assert registry.find("square").value.sides == 4
    assert registry.find("square").digest == ""


def test_an_installed_package_registers_an_extension(registry: Registry[Shape]) -> None:
    """An entry point is found by its name and carries a digest."""
    found = registry.find("pentagon")
    assert found.value.sides == 5
    assert len(found.digest) == 16


def test_a_file_is_found_and_its_digest_follows_its_source(registry: Registry[Shape], tmp_path: Path) -> None:
    digests = []
    for sides in (6, 7):
        path = tmp_path / f"mine{sides}.py"
        path.write_text(f"from tests.protocol.test_extensions import Shape\nmine = Shape('mine', {sides})\n")
        found = registry.find(f"mine{sides}.py:mine")
        assert found.value.sides == sides
        digests.append(found.digest)
    assert digests[0] != digests[1]


def test_a_module_of_the_working_directory_is_found_when_it_is_named(registry: Registry[Shape], tmp_path: Path) -> None:
    (tmp_path / "my_shapes_here.py").write_text(
        "from tests.protocol.test_extensions import Shape\nmine = Shape('mine', 8)\n"
    )
    (tmp_path / "json.py").write_text("raise SystemExit('imported from the working directory')")
    before = list(sys.path)
    assert registry.find("my_shapes_here:mine").value.sides == 8
    assert sys.path == before


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sqare", "unknown shape 'sqare'; did you mean 'square'?"),
        ("zzz", "known are dot, pentagon, square, triangle; your own is module:attribute"),
        ("no_such_module:x", "shape 'no_such_module:x': importing no_such_module failed: ModuleNotFoundError"),
        ("absent.py:x", "shape 'absent.py:x': no such file"),
        ("extra_shapes:nothing", "has no attribute 'nothing'"),
        ("extra_shapes:__name__", "expected an instance of tests.protocol.test_extensions.Shape, got str"),
    ],
)
def test_what_cannot_be_used_is_refused(registry: Registry[Shape], name: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        registry.find(name)
    assert expected in str(caught.value)


def test_two_files_with_one_name_are_refused(registry: Registry[Shape], tmp_path: Path) -> None:
    folder = next((tmp_path / "site").glob("shapes_*"))
    (folder / "other.py").write_text("from tests.protocol.test_extensions import Shape\nother = Shape('square', 9)\n")
    with pytest.raises(TypeError, match="two shape extensions are named 'square'"):
        registry.find("square")


def test_a_class_stands_for_an_instance_of_it(registry: Registry[Shape], tmp_path: Path) -> None:
    """Made once, without arguments; one that needs some is refused."""
    (tmp_path / "own.py").write_text(
        "from tests.protocol.test_extensions import Shape\n\n\nclass Own(Shape):\n"
        "    def __init__(self) -> None:\n        super().__init__('own', 5)\n"
    )
    assert registry.find("own.py:Own").value == registry.find("own.py:Own").value
    assert registry.find("own.py:Own").value.sides == 5
    with pytest.raises(ConfigError, match=r"Shape\(\) cannot be made: .*missing 2 required"):
        registry.find("own.py:Shape")
