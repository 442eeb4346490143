"""Read a launch script of another system: keys with values. `foreign_tree.py` reads YAML and JSON.

Assignments, arrays and commands are read and never executed. Variables that a script assigns are substituted, with their defaults
(``${N:-8}``) and integer arithmetic; what comes from outside (``$HOME``, ``$1``) or from a command (``$(…)``) is marked, to be named
in the report. Of ``if`` and ``case`` the part is read that the assigned variables choose; what nothing assigns is empty in a test.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from penstock.deploy.config_import.foreign_tree import OUTSIDE, UNASSIGNED, Budget, Found, marked
from penstock.protocol.config.sources import scalar
from penstock.protocol.errors import ConfigError

_MAX_SCRIPT = 256 * 1024  # a character takes up to 20 µs
_ASSIGNMENT = re.compile(r"(?:export\s+|declare\s+(?:-\w+\s+)?|local\s+|readonly\s+)?([A-Za-z_]\w*)(\+?)=")
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(\[@\]|\[\*\])?(?::?-([^{}]*))?\}|([A-Za-z_]\w*)|([@*#?0-9]))")
_COMMAND = re.compile(r"\$\((?!\()[^()]*\)|`[^`]*`")
_BARE = "\ue002"  # before a dollar outside of quotes: its value is several words
_HERE_NOW = re.compile(rf"{_BARE}?(?:\$\(pwd\)|`pwd`)")
_OF_SCRIPT = re.compile(rf"{_BARE}?\$\(dirname (?:-- )?\"?{_BARE}?\$(?:0|\{{0\}}|\{{?BASH_SOURCE(?:\[0\])?\}}?)\"?\)")
_INTO = re.compile(rf'{_BARE}?\$\(cd (?:-- )?"?([^"()&;]+?)"? (?:&?>/?\S*null (?:2>&1 )?)?&& pwd(?: -P)?\)')
_SERVERS = ("sglang.launch_server", "vllm.entrypoints")  # that a script starts beside its training
_SUM = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_OVERRIDE = re.compile(r"[+~]*[A-Za-z_][\w.@-]*=")
_ENDS = ("|", ";", "&&", "||", "&")
_LITERAL = "\ue000"  # a dollar in single quotes
_HERE = re.compile(r"(?<!<)<<-?\s*(['\"]?)([A-Za-z_]\w*)\1")
_RUN = "\ue003"  # what a command prints
_MAX_NESTED = 4  # commands in commands
_MAX_SOURCED = 16  # files
_LAUNCHERS = ("python", "torchrun", "accelerate", "deepspeed", "trl", "ray", "openrlhf", "uv", "swift")
_WRAPPERS = (
    "bash",
    "sh",
    "nohup",
    "exec",
    "time",
    "timeout",
    "env",
    "numactl",
    "srun",
    "mpirun",
    "conda",
    "poetry",
)  # start a program
_PATTERN = re.compile(r"\(?((?:[^\s()|]+\s*\|\s*)*[^\s()|]+)\)(?:\s+(.*))?", re.DOTALL)  # of a case
_STARTERS = ("accelerate", "torchrun", "deepspeed", "torch.distributed.run", "torch.distributed.launch")
_MODULE = {"-m", "--module"}  # then no file is the program
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


@dataclass(slots=True)
class _Choice:
    """An ``if``, or a ``case`` of a subject, around a statement: whether its present part is read, and whether the chosen one was."""

    subject: str | None = None
    is_read: bool = False
    is_over: bool = False

    def next_part(self, holds: bool | None) -> None:
        """Begin a part whose test holds, does not, or may: None."""
        self.is_read = holds is not False and not self.is_over
        self.is_over |= holds is True


@dataclass(slots=True)
class _Script:
    """What is known of a script down to a statement."""

    found: Found
    beside: Callable[[str], str | None]
    folder: str = "."  # of the script
    variables: dict[str, str] = field(default_factory=lambda: dict(OUTSIDE))
    arrays: dict[str, list[str]] = field(default_factory=dict)
    budget: Budget = field(default_factory=Budget)
    sourced: int = 0
    choices: list[_Choice] = field(default_factory=list)


def read_shell(name: str, text: str, beside: Callable[[str], str | None] = lambda _: None) -> Found:
    """Read the options of every command that starts a training; raises ConfigError for quotes that never end, and for a long one.

    ``beside`` returns the text of a file that the script sources, by its name relative to it; None: it is not there.
    """
    script = _Script(Found(), beside, name.rpartition("/")[0] or ".")
    _read_all(name, text, script)
    if not script.found.commands:  # a file of variables, as wrappers source it
        for key, value in script.variables.items():
            if (key, value) not in OUTSIDE.items():
                script.found.add(key, scalar(value))
    return script.found


def _read_all(name: str, text: str, script: _Script) -> None:
    if len(text) > _MAX_SCRIPT:
        raise ConfigError(f"{name}: a script of {len(text)} characters, the limit is {_MAX_SCRIPT}")
    for number, statement in _statements(text):
        try:
            _read_parts(statement, script)
        except ValueError as err:  # shlex: no closing quotation; or the budget
            raise ConfigError(f"{name}:{number}: not a readable shell command: {err}") from None


def _read_parts(statement: str, script: _Script) -> None:
    is_met = True  # the test before &&
    for part, is_last in _parts(statement):
        if chosen := _chosen(part.strip(), script):
            is_test = not is_last and chosen.startswith("[")
            if is_met and not is_test:
                _read(chosen, script)
            is_met = _holds(chosen, script) is True if is_test else is_last or is_met


def _parts(statement: str) -> Iterator[tuple[str, bool]]:
    """Yield the commands between ``;`` and ``&&`` outside of quotes and brackets, and whether it is the last of those joined by ``&&``."""
    part, depth = "", 0
    for character, quote in _in_quotes(statement):
        depth += 0 if quote else (character == "(") - (character == ")")
        part += character
        if not quote and depth <= 0 and part.endswith((";", "&&")):
            yield part.rstrip(";&"), character == ";"
            part, depth = "", 0
    yield part, True


def _chosen(part: str, script: _Script) -> str:
    """Return a command without the words of ``if`` and ``case`` before it; empty where another part of these is chosen."""
    choices = script.choices
    word, _, rest = part.partition(" ")
    if word in ("if", "case"):
        choices.append(_Choice(_assigned("".join(_words(rest, script)[:1])) if word == "case" else None))
    if word in ("fi", "esac"):
        del choices[-1:]
    elif word in ("if", "elif", "else") and choices:
        choices[-1].next_part(True if word == "else" else _holds(rest, script))
    elif choices and choices[-1].subject is not None and (pattern := _PATTERN.fullmatch(part)):
        choices[-1].next_part(any(fnmatchcase(choices[-1].subject, one.strip(" \"'")) for one in pattern[1].split("|")))
        return _chosen(pattern[2] or "", script)
    if word in ("then", "else", "do") and rest:
        return _chosen(rest, script)
    is_read = all(choice.is_read for choice in choices)
    return part if is_read and word not in ("if", "elif", "else", "case", "fi", "esac") else ""


def _assigned(text: str) -> str:
    """Return a text in which variables that nothing assigns are empty; what commands print stays marked."""
    parts = text.split(UNASSIGNED)
    parts[1::2] = [marked(name) if name.startswith("$") else "" for name in parts[1::2]]
    return "".join(parts)


def _holds(test: str, script: _Script) -> bool | None:
    """Return whether a test of texts or numbers holds; None for another test, and for one of what a command prints."""
    words = [_assigned(word) for word in _words(test, script)]
    if any(UNASSIGNED in word for word in words):
        return None
    match words[1:-1] if words[:1] in (["["], ["[["]) and words[-1] in ("]", "]]") else words:
        case [("true" | "false") as word]:
            return word == "true"
        case [("-z" | "-n") as sign, text]:
            return bool(text) == (sign == "-n")
        case [one, ("=" | "==" | "!=") as sign, other]:
            return fnmatchcase(one, other) != (sign == "!=")
        case [one, ("-eq" | "-ne" | "-lt" | "-le" | "-gt" | "-ge") as sign, other] if one.isdigit() and other.isdigit():
            return bool(getattr(operator, sign[1:])(int(one), int(other)))
        case _:
            return None


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Yield every command with its line: lines joined after a backslash and within quotes, and arrays up to their bracket."""
    lines = text.split("\n")
    number = 0
    while number < len(lines):
        first, statement, quote = number + 1, lines[number], _quote_after(lines[number])
        number += 1
        is_array = re.match(rf"\s*{_ASSIGNMENT.pattern}\(", statement) is not None
        while number < len(lines):
            bare = re.sub(r"(^|\s)#.*", "", statement.split("\n")[-1]).rstrip()
            if bare.endswith("\\"):
                statement = statement.rstrip().removesuffix("\\") + " " + lines[number]
            elif quote or (is_array and not bare.endswith(")")):
                statement += "\n" + lines[number]
            else:
                break
            quote = _quote_after(lines[number], quote)
            number += 1
        if here := _HERE.search(statement):  # the text of a command, such as a file that it writes
            ends = (place for place in range(number, len(lines)) if lines[place].strip() == here[2])
            end = next(ends, number - 1)
            if read := re.match(r"\s*read\s.*?([A-Za-z_]\w*)\s*<<", statement):  # the value of a variable
                statement = f"{read[1]}={shlex.quote(' '.join(lines[number:end]).replace(chr(92), ' '))}"
            number = end + 1
        if statement.strip() and not statement.lstrip().startswith("#"):
            yield first, statement.strip()


def _in_quotes(text: str, quote: str = "") -> Iterator[tuple[str, str]]:
    """Yield every character with the quote that holds it: empty for none, # in comments."""
    is_escaped = is_comment = False
    previous = " "
    for character in text:
        if is_comment:
            is_comment = character != "\n"
        elif is_escaped:
            is_escaped = False
        elif character == "\\" and quote != "'":
            is_escaped = True
        elif quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        else:
            is_comment = character == "#" and previous.isspace()
        previous = character
        yield character, "#" if is_comment else quote


def _quote_after(line: str, quote: str = "") -> str:
    *_, (_, last) = [("", quote), *_in_quotes(line, quote)]
    return last.strip("#")


def _read(statement: str, script: _Script) -> None:
    assignment = _ASSIGNMENT.match(statement)
    if assignment and statement[assignment.end() :].startswith("("):
        words = _words(statement[assignment.end() + 1 :].rstrip().removesuffix(")"), script)
        script.arrays[assignment[1]] = (script.arrays.get(assignment[1], []) if assignment[2] else []) + words
        return
    words = _words(statement.split(" << ", maxsplit=1)[0].split(" <<'", maxsplit=1)[0], script)
    while words and (match := _ASSIGNMENT.fullmatch(words[0].partition("=")[0] + "=")) and "=" in words[0]:
        script.variables[match[1]] = words.pop(0).partition("=")[2]
    if words and words[0] in ("export", "declare", "readonly", "local"):
        for word in words[1:]:
            if "=" in word:
                script.variables[word.partition("=")[0]] = word.partition("=")[2]
        return
    if len(words) == 2 and words[0] in ("source", ".") and script.sourced < _MAX_SOURCED:
        script.sourced += 1
        known, _, rest = words[1].rpartition(UNASSIGNED)  # of a folder that is not known the script's is tried
        name = rest.lstrip("/") if known else rest.removeprefix(f"{script.folder}/")
        if name and (text := script.beside(name)):
            _read_all(name, text, script)
    elif words and words[0].rpartition("/")[2] in _WRAPPERS and "-c" in words[:-1]:  # bash -c 'a && b'
        _read_parts(words[words.index("-c") + 1], script)
    elif (started := _training(words)) or (
        words and words[0].startswith("--") and script.found.commands
    ):  # no "\\" before it
        words = started or words
        script.found.commands.append(" ".join(words))
        words = words if words[0][0] != "-" else ["", *words]
        _options(words, script.found)


def _training(words: list[str]) -> list[str]:
    """Return the words of a command from the program that trains on; none for another command."""
    program = words[0].rpartition("/")[2] if words else ""
    if program in _WRAPPERS:
        place = next((place for place, word in enumerate(words) if place and _is_program(word)), len(words))
        return _training(words[place:])
    is_other = not _is_program(program) or words[1:2] == ["start"] or "-c" in words[:3]
    is_other |= any(word.startswith(_SERVERS) for word in words[:4])
    return [] if is_other or (len(words) == 1 and program.endswith((".sh", ".py"))) else words


def _is_program(word: str) -> bool:
    name = word.rpartition("/")[2]
    return name.startswith(_LAUNCHERS) or name.endswith((".sh", ".py")) or name in _WRAPPERS


def _options(words: list[str], foreign_config: Found) -> None:
    """Add ``a.b=c``, ``--flag value``, ``--flag=value`` and ``--flag``, as a switch, of one command."""
    if words[0] == "ray" and "--" in words:
        words = words[words.index("--") + 1 :]
    launches = not _MODULE & {*words} and any(word.rpartition("/")[2] in _STARTERS for word in words[:4])
    position = 1
    while position < len(words):
        word = words[position]
        position += 1
        if word in _ENDS or word.startswith((">", "2>", "1>")):
            return
        name, separator, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and not separator:
            values = []
            while position < len(words) and _is_value(words[position]):
                values.append(words[position])
                position += 1
            if launches and values and values[-1].endswith(".py"):  # the program, behind an option of the launcher
                values, launches = values[:-1], False
            foreign_config.add(
                name, True if not values else _parsed(values[0]) if len(values) == 1 else list(map(_parsed, values))
            )
        elif separator and re.fullmatch(r"[+~]*[A-Za-z_][\w.@-]*", name):
            foreign_config.add(name, _parsed(value))
        elif re.fullmatch(r"~[A-Za-z_][\w.]*", word):
            foreign_config.add(word, None)
        launches = launches and not word.endswith(".py")


def _is_value(word: str) -> bool:
    if re.fullmatch(r"\w+=[^,=]*(,\w+=[^,=]*)+", word):  # transformers' --optim_args "beta1=0.9,beta2=0.95"
        return True
    return not (word.startswith(("--", ">", "2>", "1>")) or word in _ENDS or _OVERRIDE.match(word))


def _parsed(text: str) -> object:
    value = scalar(text)
    if isinstance(value, str) and value.startswith("[") and value.endswith("]"):  # hydra's lists need no quotes
        return [scalar(item.strip().strip("\"'")) for item in value[1:-1].split(",") if item.strip()]
    return value


def _words(text: str, script: _Script) -> list[str]:
    text = _SUM.sub(lambda one: _computed(one[1], script.variables), _with_marks(text))
    text = _INTO.sub(r"\1", _OF_SCRIPT.sub(lambda _: script.folder, _HERE_NOW.sub(".", text)))
    for _ in range(_MAX_NESTED):
        text = _COMMAND.sub(marked(_RUN), text)
    text = text.replace(_RUN, "$(...)")
    words: list[str] = []
    for word in shlex.split(text, comments=True):
        is_bare, word = word.startswith(_BARE), word.replace(_BARE, "")
        whole = _VARIABLE.fullmatch(word)
        if whole and whole[1] in script.arrays:
            words += [script.budget.take(item + " ")[:-1] for item in script.arrays[whole[1]]]
        elif whole and whole[2]:
            words.append(f"--{whole[1]}={marked(whole[1])}")  # an array from elsewhere: a key of its own in the report
        elif not (whole and whole[5]):  # "$@": the arguments of the script itself
            value = _substituted(word, script.variables, script.budget).replace(_LITERAL, "$")
            words += value.split() if whole and is_bare else [value]
    return words


def _with_marks(text: str) -> str:
    """Return the text with dollars in single quotes replaced, as no variable is meant there, and those outside of quotes marked."""
    marks = {"'": _LITERAL, '"': "$", "": f"{_BARE}$", "#": "$"}
    return "".join(marks[quote] if character == "$" else character for character, quote in _in_quotes(text))


def _substituted(word: str, variables: dict[str, str], budget: Budget) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[4] or match[5]
        if name in variables:
            return budget.take(variables[name])
        return marked(name) if match[3] is None else match[3]

    for _ in range(8):  # a default may name another variable
        if not _VARIABLE.search(word):
            break
        word = _VARIABLE.sub(value, word)
    return word


def _computed(text: str, variables: dict[str, str]) -> str:
    def of(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name):
            return int(variables[node.id])
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](of(node.left), of(node.right))
        raise ValueError(text)

    try:
        plain = _VARIABLE.sub(lambda one: one[1] or one[4] or "0", text)
        return str(of(ast.parse(plain.strip(), mode="eval").body))
    except (KeyError, ValueError, SyntaxError, ZeroDivisionError, RecursionError):
        return marked("$((" + "".join(text.split()) + "))")
