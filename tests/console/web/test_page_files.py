"""The page's files: what is vendored is what was published, nothing on the page can become HTML or a script, and every text has a translation."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
from pathlib import Path

import pytest

from penstock.console.live import run_view
from penstock.console.report import diagnoses, learning
from penstock.console.web import app
from penstock.console.web.reading import documents

PAGES = (Path(app.__file__).parent / "pages").resolve()
# sha256 of the files in the npm package uplot 1.6.32; vendor/uplot/SHA256SUMS has the same.
UPLOT = {
    "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
OWN = sorted(path for path in PAGES.rglob("*.js") if "vendor" not in path.parts)
TEXTS = json.loads((PAGES / "texts.json").read_text("utf-8"))
# Names of the browser's interfaces, of files and units, of figures, and classes of elements.
NO_WORDS = re.compile(
    r"\(prefers-color-scheme: dark\)| – Penstock|Penstock|[A-Z]|[kMGT]?B|GET|POST|PUT|DELETE|Content-Type|TimeoutError|AbortError"
    r"|Arrow(?:Left|Right)|Enter|(?:environment [a-z]+|gradient norm|update ratio): |reward part |use strict|filters charts|text log|key k|waiting for the services"
    r"|11px system-ui|a, button, input, summary, \.scroll|#/.*|[a-z]+[A-Z]\w*"
)
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
    assert sum(path.stat().st_size for path in PAGES.rglob("*") if path.is_file()) < 225_000


def test_every_text_of_the_page_has_its_english_and_its_chinese() -> None:
    """With the same placeholders; every key of the code is there, and every key is used."""
    for key, (english, chinese) in TEXTS["page"].items():
        for form in english.split("|"):
            assert set(re.findall(r"{\w+}", form)) == set(re.findall(r"{\w+}", chinese)), key
        assert "|" not in english + chinese or ("{n}" in english and "|" not in chinese), key
    code = "".join(path.read_text("utf-8") for path in (*OWN, PAGES / "index.html"))
    made = tuple(re.findall(r"t\(`([a-z]+\.)\$", code))  # with the name of a field or a colour
    named = set(re.findall(r"\bt\(\"([^\"]+)\"", code))
    assert named <= TEXTS["page"].keys()
    named |= set(re.findall(r'"([a-z]+\.[a-z0-9-]+)"', code))
    assert {key for key in TEXTS["page"] if not key.startswith(made)} <= named


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_no_text_is_left_in_the_code_of_the_page(path: Path) -> None:
    """What a literal has is for the browser or the API: no words, nothing that begins with a capital, no heading or label."""
    code = re.sub(r"throw new Error\(.*?\);|(?m:(?:^| )//.*$)", "", path.read_text("utf-8"))
    literals = re.findall(r'"((?:[^"\\\n]|\\.)*)"', code) + re.findall(r'[`}]([^`${}\n("?]*)(?=[`$])', code)
    left = {text for text in literals if re.search(r"[A-Z]|[^\W\d_] |[^\x00-\x7f…–⤢−∞∅]", text)}
    assert {text for text in left if not NO_WORDS.fullmatch(text) and not re.search("[`$]", text)} == set()
    assert re.findall(r"(?:\}, |panel\(|table\(|(?:title|label|placeholder): )[\"`][a-z][^\"`]*[\"`][,)]", code) == []
    assert re.findall(r'\["[^".]*", \(', code) == []  # the heading of a column


def test_what_the_api_says_of_a_run_is_in_chinese_too() -> None:
    """Diagnoses, why groups are dropped, sentences of figures outside of their band, and names of figures."""
    said = {re.sub(r"{[^{}]*}", "{}", text) for text in TEXTS["api"]}
    own = [*learning.LABELS.values(), *diagnoses.MEANINGS.values(), diagnoses.OF_A_FILTER, *documents._OUTSIDE.values()]
    for node in ast.walk(ast.parse(inspect.getsource(diagnoses) + inspect.getsource(run_view))):
        names = [node.arg] if isinstance(node, ast.keyword) else map(ast.unparse, getattr(node, "targets", []))
        if {"what", "cause", "cure"} & set(names) and isinstance(node.value, (ast.Constant, ast.JoinedStr)):
            own.append(re.sub(r"{[^{}]*}", "{}", ast.unparse(node.value).removeprefix("f")[1:-1]))
    assert len(own) > 100
    assert [text for text in own if text not in said] == []
    for text, chinese in TEXTS["api"].items():
        assert set(re.findall(r"{(\d)}", str(chinese))) == {str(n + 1) for n in range(text.count("{}"))}, text
