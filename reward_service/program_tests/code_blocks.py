"""The program in a completion: what follows its thinking, and the fenced code blocks of that text, by CommonMark.

Blocks may stand in list items and block quotes, whose indentation and marks are removed. Beyond CommonMark, for what models
write: a fence within a triple-quoted text of Python does not end a block, a block of Markdown is searched for blocks, a first line
left of the block's list item takes the block out of the item, and a first fence after nothing but code ends the block that
the prompt opened. Every function takes time linear in its text. Pure.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

LANGUAGES = ("python", "python3", "py", "py3", "pypy", "pypy3", "ipython")
MAX_PROGRAM_CHARS = 256 * 1024
_MAX_PARSED_CHARS = 32 * 1024
_MARKDOWN = ("markdown", "md")
# The tags of a chain of thought, as the families of models write them.
THINKING = re.compile(
    r"(?:<|◁)(?P<closes>/?)(?:think|thinking|thought|reasoning)(?:>|▷)|"
    r"(?P<begins>\[THINK\]|<\|begin_of_thought\|>|<\|channel\|>analysis<\|message\|>)|"
    r"\[/THINK\]|<\|end_of_thought\|>|<\|channel\|>final<\|message\|>",
    re.IGNORECASE,
)
_ANSWER = re.compile(
    r"^[ \t]*</?(?:answer|solution)>|</?(?:answer|solution)>[ \t]*$|^(?-i:\[(?:BEGIN|DONE|/?PYTHON)\])[ \t]*$",
    re.IGNORECASE | re.MULTILINE,
)
_TAGS = (("<answer>", "</answer>"), ("<solution>", "</solution>"), ("[begin]", "[done]"), ("[python]", "[/python]"))
_END_TOKENS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<|end|>", "<|return|>", "</s>", "<eos>",
    "<end_of_turn>", "<｜end▁of▁sentence｜>",
)  # fmt: skip
_MAX_END_TOKENS = 8
_FENCE = re.compile(r"(`{3,})([^`]*)|(~{3,})(.*)")
_BEHIND_TEXT = re.compile(r"[^`]`{3}(\w+)$")  # a fence that opens a block of Python at the end of a line
_LANGUAGE = re.compile(r"\{?\.?([\w+#-]+)")
_ITEM = re.compile(r"(?:[-*+]|[0-9]{1,9}[.)])(?: +|$)")
_LEAD = re.compile(r"[ \t]*(?:(?:[-*+]|[0-9]{1,9}[.)])[ \t]+)*")
_CODE_INDENT = 4  # from here on a line is indented code, and no fence
_MAX_NESTED = 16  # containers in each other; deeper ones are text
_DEFINED = re.compile(r"\b(?:def|class)\s+(\w+)|^(\w+)[ \t]*=(?!=)", re.MULTILINE)
_QUOTE = -1  # the column of a block quote; a list item has that of its content
# The comments and texts of a line of Python; group 1 begins a triple-quoted text.
_TOKENS = re.compile(r"#.*|(\"\"\"|''')|\"(?:[^\"\\]|\\.)*(?:\"|\\?$)|'(?:[^'\\]|\\.)*(?:'|\\?$)")


def program(completion: str, names: Sequence[str] = ()) -> str | None:
    """Return the last fenced block marked as Python, else the last without a language, else the whole text.

    Blocks that define one of the ``names`` of what is called come before those that do not: an example of its use follows.
    None when there is no program: nothing but white space or thinking, only blocks in other languages, or too long a text.
    A block that is never closed reaches to the end.
    """
    answer = before_end(after_thinking(completion))
    text = _ANSWER.sub("\n", answer.lstrip("\ufeff"))
    blocks = [block for block in fenced_blocks(text) or fenced_blocks(text, indented=True) if block[1].strip()]
    python = [content for language, content in blocks if language in LANGUAGES]
    unnamed = [content for language, content in blocks if not language]
    called = frozenset(names)
    python = [code for code in python if called & {name for pair in _DEFINED.findall(code) for name in pair}] or python
    chosen: str | None = _before_stray_fence(text)
    if chosen is None or any(map(is_program, (*python, *unnamed))):
        whole = None if blocks else _ANSWER.sub("\n", _tagged(answer))
        chosen = next(iter([*python[-1:], *unnamed[-1:]]), whole)
    return chosen if chosen is not None and chosen.strip() and len(chosen) <= MAX_PROGRAM_CHARS else None


def _tagged(text: str) -> str:
    """Return what stands in the last tags (`_TAGS`) of a text that ends there, else the text."""
    lower = text.lower().rstrip()
    for opening, closing in _TAGS:
        if lower.endswith(closing) and (start := lower.rfind(opening)) >= 0:
            return text[start : len(lower) - len(closing)]
    return text


def before_end(text: str) -> str:
    """Return a text without the control tokens that end it."""
    for _ in range(_MAX_END_TOKENS):
        bare = text.rstrip()
        if not bare.endswith(_END_TOKENS):
            break
        text = bare[: bare.rfind("<")]
    return text


def after_thinking(text: str) -> str:
    """Return a text without its thinking, finished or not; the first may have been opened by the prompt."""
    kept: list[str] = []
    start, thinks = 0, False
    for place, end, closes in _tags(text):
        if closes:
            kept = kept if thinks else []
            start, thinks = end, False
        elif not thinks:
            kept.append(text[start:place])
            thinks = True
    return "".join(kept if thinks else [*kept, text[start:]])


def _tags(text: str) -> Iterator[tuple[int, int, bool]]:
    """Return where the tags of thinking begin and end, and if they close it; those in texts and comments of fenced code are none."""
    begin, is_code, quote = 0, False, ""
    for line in text.split("\n"):
        fence = None if quote else _FENCE.fullmatch(line.strip())
        is_code = bool(fence[2] or fence[4] or not is_code) if fence else is_code
        read = line
        if is_code and fence is None:
            read = "" if quote else _TOKENS.sub(lambda token: " " * len(token[0]), line)
            quote = _open_quote(line, quote)
        for tag in THINKING.finditer(read):
            yield begin + tag.start(), begin + tag.end(), ends_thinking(tag)
            is_code, quote = False, ""
        begin += len(line) + 1


def ends_thinking(tag: re.Match[str]) -> bool:
    return not tag["begins"] and tag["closes"] != ""


def _before_stray_fence(text: str) -> str | None:
    """Return the text before the first fence if that has no language and follows a program."""
    head: list[str] = []
    quote = ""
    for line in text.replace("\r\n", "\n").split("\n"):
        fence = _FENCE.fullmatch(line.strip()) if not quote else None
        if fence is not None:
            before = "".join(f"{one}\n" for one in head)
            return before if not (fence[2] or fence[4]) and is_program(before) else None
        quote = _open_quote(line, quote)
        head.append(line)
    return None


def is_program(text: str) -> bool:
    """Return True for Python that does something: a number, a name or a text alone is none."""
    if not text.strip() or len(text) > _MAX_PARSED_CHARS:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(not isinstance(line, ast.Expr) or isinstance(line.value, ast.Call | ast.Await) for line in body)


def _open_quote(line: str, quote: str) -> str:
    """Return the triple quote that is open after a line of Python, given the one before it; "" for none."""
    end = line.find(quote) + len(quote)
    if quote and end < len(quote):
        return quote
    while (token := _TOKENS.search(line, end)) is not None:
        end = token.end()
        if token[1]:
            closing = line.find(token[1], end)
            if closing < 0:
                return token[1]
            end = closing + 3
    return ""


@dataclass(slots=True)
class _Block:
    language: str
    fence: str
    indent: int  # of the fence in its container
    containers: list[int]
    lines: list[str] = field(default_factory=list)
    quote: str = ""  # the triple quote that is open
    is_loose: bool = False  # taken out of its list item

    def ends_with(self, text: str, indent: int) -> bool:
        mark = text.strip()
        return (
            mark == self.fence[0] * len(mark)
            and len(mark) >= len(self.fence)
            and (indent < _CODE_INDENT or self.is_loose)
        )

    def glued(self, line: str) -> str:
        """Return the code of a line that the closing fence stands behind; "" for other lines."""
        text = line.rstrip()
        code = text.removesuffix(self.fence)
        is_closed = code != text and not self.quote and self.language not in _MARKDOWN
        return code if is_closed and code.strip() and "`" not in code and "#" not in code else ""


def fenced_blocks(text: str, *, indented: bool = False) -> list[tuple[str, str]]:
    """Return the language, in lower case, and the content of each fenced code block; for one of Markdown, of those in it.

    With ``indented`` fences may be indented by four columns and more.
    """
    found: list[tuple[str, str]] = []
    for language, content in _blocks(text, indented):
        found += _blocks(content, indented) if language in _MARKDOWN else [(language, content)]
    return found


def _blocks(text: str, indented: bool) -> list[tuple[str, str]]:
    lines = text.replace("\r\n", "\n").split("\n")
    last = {quote: max((n for n, line in enumerate(lines) if quote in line), default=-1) for quote in ("'''", '"""')}
    blocks: list[_Block] = []
    block: _Block | None = None
    containers: list[int] = []
    for place, line in enumerate(lines):
        if block is not None:
            rest, matched = _within(line, block.containers)
            if matched < len(block.containers) and not any(map(str.strip, block.lines)) and not _ITEM.match(line):
                block.containers, block.is_loose = block.containers[:matched], True
            if matched >= len(block.containers):
                indent = len(rest) - len(rest.lstrip(" "))
                if block.ends_with(rest, indent) and last.get(block.quote, -1) <= place:
                    block = None
                else:
                    content = rest[min(indent, block.indent) :] if block.indent or block.containers else line
                    code = block.glued(content)
                    block.lines.append(code or content)
                    block.quote = _open_quote(content, block.quote)
                    block = None if code else block
                continue
            containers = block.containers
        containers, rest = _containers_of(line, containers)
        indent = len(rest) - len(rest.lstrip(" "))
        fence = _FENCE.fullmatch(rest.strip()) if indented or indent < _CODE_INDENT else None
        block = None
        if fence is None and (behind := _BEHIND_TEXT.search(rest.strip())) and behind[1].lower() in LANGUAGES:
            fence = _FENCE.fullmatch(f"```{behind[1]}")
        if fence is not None:
            named = _LANGUAGE.match((fence[2] or fence[4] or "").strip())
            block = _Block(
                named[1].lower() if named else "", fence[1] or fence[3], indent, containers, is_loose=indented
            )
            blocks.append(block)
    if block is not None and block.lines[-1:] == [""]:
        block.lines.pop()
    return [(made.language, "".join(f"{line}\n" for line in made.lines)) for made in blocks]


def _within(line: str, containers: list[int]) -> tuple[str, int]:
    """Return the rest of a line after its containers' indentation and marks, and how many of them it is in."""
    lead = _LEAD.match(line)
    rest = lead[0].expandtabs(4) + line[lead.end() :] if lead else line
    for matched, column in enumerate(containers):
        if column == _QUOTE:
            if not rest.lstrip(" ").startswith(">"):
                return rest, matched
            rest = rest.lstrip(" ")[1:].removeprefix(" ")
        elif rest.strip() and rest[:column].strip():
            return rest, matched
        else:
            rest = rest[column:]
    return rest, len(containers)


def _containers_of(line: str, containers: list[int]) -> tuple[list[int], str]:
    """Return the containers that a line outside of code blocks is in, those that it opens included, and its rest."""
    rest, matched = _within(line, containers)
    opened = containers[:matched]
    while (indent := len(rest) - len(rest.lstrip(" "))) < _CODE_INDENT and len(opened) < _MAX_NESTED:
        item = _ITEM.match(rest, indent)
        if item is not None:
            content = item.end() if rest[item.end() :].strip() else len(item[0].rstrip(" ")) + indent + 1
            opened, rest = [*opened, content], rest[content:]
        elif rest[indent : indent + 1] == ">":
            opened, rest = [*opened, _QUOTE], rest[indent + 1 :].removeprefix(" ")
        else:
            break
    return opened, rest
