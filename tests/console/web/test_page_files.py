"""The page's files: what is vendored is what was published, and nothing on the page can become HTML or a script."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from penstock.console.web import app

PAGES = (Path(app.__file__).parent / "pages").resolve()
# sha256 of the files in the npm package uplot 1.6.32; vendor/uplot/SHA256SUMS has the same.
UPLOT = {
    "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
OWN = sorted(path for path in PAGES.rglob("*.js") if "vendor" not in path.parts)
# What turns a text into HTML, a script or a request to another place.
FORBIDDEN = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|createContextualFragment"
    r"|srcdoc|setAttribute\(\"on|https?://(?!www\.w3\.org/2000/svg)|\.style\.cssText|import\("
)


@pytest.mark.parametrize("name", UPLOT)
def test_vendored_files_are_those_of_the_package(name: str) -> None:
    """UPlot 1.6.32, unchanged, with its licence."""
    folder = PAGES / "vendor" / "uplot"
    assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == UPLOT[name]
    assert f"{UPLOT[name]}  {name}" in (folder / "SHA256SUMS").read_text().splitlines()


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_no_script_of_the_page_makes_html_of_a_text_or_loads_from_elsewhere(path: Path) -> None:
    """Elements are made by `dom.js`, whose texts are text nodes."""
    assert FORBIDDEN.findall(path.read_text("utf-8")) == []


def test_the_page_has_no_inline_script_style_or_handler() -> None:
    """Its Content-Security-Policy refuses them; every file is the console's own."""
    html = (PAGES / "index.html").read_text("utf-8")
    assert re.findall(r"<script(?![^>]* src=)[^>]*>|<style|\son\w+=|\sstyle=", html) == []
    assert all(url.startswith(("/static/", "#")) for url in re.findall(r"(?:src|href)=\"([^\"]*)\"", html))


def test_every_import_of_the_page_names_a_file_that_is_there() -> None:
    for path in OWN:
        for name in re.findall(r"from \"([^\"]+)\"", path.read_text("utf-8")):
            assert (path.parent / name).resolve().is_relative_to(PAGES)
            assert (path.parent / name).is_file(), f"{path.name}: {name}"


def test_files_are_small_enough_for_a_slow_link() -> None:
    assert sum(path.stat().st_size for path in PAGES.rglob("*") if path.is_file()) < 160_000
