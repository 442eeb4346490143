"""The page's files: what is vendored is what was published, nothing on the page can become HTML or a script, and every text is in the catalogues."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

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
CODE = [path for path in OWN if path.parent.name != "texts"]
PAGE_TEXTS = {
    path.stem: json.loads(path.read_text("utf-8").partition("export default ")[2].rstrip("\n;"))
    for path in PAGES.glob("texts/*.js")
}
TOKEN = re.compile(
    r"""//[^\n]*|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|[`{}]|(?<=[(,=:!&|?\n ])/(?![/* ])(?:[^/\\\n[]|\\.|\[(?:[^]\\\n]|\\.)*\])+/"""
    r"|[^\"'`/{}]+|.",
    re.S,
)
# Names of the browser's interfaces, of files and units, of figures, and classes of elements.
NO_WORDS = re.compile(
    r"en-US|\(prefers-color-scheme: dark\)| – Penstock|Penstock|[A-Z]|[kMGT]?B|GET|POST|PUT|DELETE|Content-Type|TimeoutError|AbortError"
    r"|Arrow(?:Left|Right)|Enter|(?:environment [a-z]+|gradient norm|update ratio): |reward part |use strict|filters charts|key k"
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


def test_every_text_of_the_page_is_in_the_catalogue_of_each_language() -> None:
    """With the same placeholders; every key of the code is there, and every key is used."""
    english, chinese = PAGE_TEXTS["en"]["page"], PAGE_TEXTS["zh"]["page"]
    assert list(english) == list(chinese)
    for key, text in english.items():
        assert sorted(re.findall(r"{\w+}", text)) == sorted(re.findall(r"{\w+}", chinese[key])), key
    code = "".join(path.read_text("utf-8") for path in (*CODE, PAGES / "index.html"))
    made = re.findall(r"t\(`([a-z]+\.)\$", code)  # with the name of a field or a colour
    named = (
        set(re.findall(r"\bt\(\"([^\"]+)\"", code)) | set(re.findall(r'"([a-z]+\.[a-z0-9-]+)"', code)) & english.keys()
    )
    assert named - english.keys() == set()
    assert {key for key in english if not key.startswith(tuple(made))} - named == set()


@pytest.mark.parametrize("path", CODE, ids=lambda path: path.name)
def test_no_text_is_left_in_the_code_of_the_page(path: Path) -> None:
    """What a literal has is for the browser or the API: no words, nothing that begins with a capital, no text of an element."""
    code = re.sub(r"throw new Error\(.*?\);", "", path.read_text("utf-8"))
    left = {text for text in literals(code) if re.search(r"[A-Z]|[^\W\d_] |[^\x00-\x7f…–⤢−∞∅]", text)}
    assert {text for text in left if not NO_WORDS.fullmatch(text)} == set()
    assert (
        re.findall(
            r"(?:\}, |panel\(|table\(|(?:title|label|placeholder): |textContent = )[\"`][a-z][^\"`]*[\"`][,)]", code
        )
        == []
    )
    assert re.findall(r'\["[^".]*", \(', code) == []  # the heading of a column


def test_what_the_api_says_of_a_run_is_in_chinese_too() -> None:
    """Diagnoses, why groups are dropped, sentences of figures outside of their band, and names of figures."""
    said = {re.sub(r"{[^{}]*}", "{}", text) for text in PAGE_TEXTS["zh"]["api"]}
    own = [*learning.LABELS.values(), *diagnoses.MEANINGS.values(), diagnoses.OF_A_FILTER, *documents._OUTSIDE.values()]
    own += [text for module in (diagnoses, run_view) for text in _diagnosed(module)]
    assert [text for text in own if text not in said] == []
    for text, translation in PAGE_TEXTS["zh"]["api"].items():
        assert set(re.findall(r"{(\d)}", translation)) == {str(n + 1) for n in range(text.count("{}"))}, text


def _diagnosed(module: ModuleType) -> Iterator[str]:
    """Yield each text that a module gives a diagnosis as what, cause or cure, its values as {}."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        names = (
            [node.arg]
            if isinstance(node, ast.keyword)
            else [ast.unparse(one) for one in node.targets]
            if isinstance(node, ast.Assign)
            else []
        )
        if {"what", "cause", "cure"} & set(names) and isinstance(node.value, (ast.Constant, ast.JoinedStr)):
            parts = node.value.values if isinstance(node.value, ast.JoinedStr) else [node.value]
            yield "".join(
                re.sub(r"{[^{}]*}", "{}", one.value) if isinstance(one, ast.Constant) else "{}" for one in parts
            )


def literals(code: str) -> Iterator[str]:
    """Yield every string of a script, and every piece of a template."""
    braces: list[bool] = []  # the open ones: whether it is one of a template
    at = 0
    while token := TOKEN.match(code, at):
        at = token.end()
        if token[0] == "{":
            braces.append(False)
        elif token[0][0] in "\"'":
            yield token[0][1:-1]
        elif token[0] == "`" or (token[0] == "}" and braces.pop()):
            piece = re.compile(r"((?:[^`\\$]|\\.|\$(?!{))*)(`|\${)", re.S).match(code, at)
            assert piece is not None
            at = piece.end()
            yield piece[1]
            if piece[2] == "${":
                braces.append(True)
