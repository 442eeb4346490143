"""The program that renders one chat template, with kernel limits of memory and CPU time; `chat_template` starts it.

A frame is 8 bytes, its length, and that many bytes. The first request is the template's text, each later one what a
rendering gets; both as `marshal` writes them. An answer begins with ``+`` and goes on with the text, or with ``-`` and
the reason of a refusal. Whatever a template does, in C code too, the kernel ends: `SIGPROF` kills the process once a
request has used its CPU time, and beyond the limit of memory no allocation succeeds. Imports no package but `jinja2`.
"""

from __future__ import annotations

import json
import marshal
import os
import resource
import signal
import sys
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_OUT_OF_MEMORY = 3  # exit code


class _Environment(ImmutableSandboxedEnvironment):
    opening = closing = ""  # around the text of a generation block

    def __init__(self) -> None:
        extensions = [_GenerationBlocks, loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, autoescape=False)
        self.globals.pop("lipsum")
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.filters["tojson"] = _to_json


class _GenerationBlocks(Extension):
    """Renders the content of ``{% generation %}`` blocks, with which templates mark assistant turns."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares tags

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        around = (nodes.EnvironmentAttribute(name) for name in ("opening", "closing"))
        opening, closing = (nodes.Output([text], lineno=line) for text in around)
        return [opening, *parser.parse_statements(("name:endgeneration",), drop_needle=True), closing]


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # The filter of jinja2 escapes HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def main(max_bytes: int, max_chars: int) -> None:
    """Compile the template of the first request, then answer renderings until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the service, which then closes stdin
    environment = _Environment()
    template: jinja2.Template | None = None
    while (request := _request()) is not None:
        try:
            cpu_s, payload = request
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            if template is None:
                template, text = environment.from_string(payload), ""
            else:
                environment.opening, environment.closing, names = payload
                text = template.render(names)
            if len(text) > max_chars:
                raise jinja2.TemplateError(f"the text has {len(text)} characters, the limit is {max_chars}")
            answer = b"+" + text.encode()
        except MemoryError:
            os._exit(_OUT_OF_MEMORY)
        except UnicodeEncodeError:
            answer = b"-the text has a lone surrogate, which no tokenizer encodes"
        except Exception as err:  # noqa: BLE001 - code from outside: whatever its compilation or execution raises
            answer = b"-" + _one_line(err).encode(errors="replace")
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _write(answer)


def _request() -> tuple[float, Any] | None:
    head = sys.stdin.buffer.read(8)
    if len(head) < 8:
        return None
    return marshal.loads(sys.stdin.buffer.read(int.from_bytes(head, "little")))  # noqa: S302  our parent's


def _write(answer: bytes) -> None:
    sys.stdout.buffer.write(len(answer).to_bytes(8, "little") + answer)
    sys.stdout.buffer.flush()


def _one_line(err: Exception) -> str:
    text = " ".join(str(err)[:1000].split())[:300]
    return text if isinstance(err, jinja2.TemplateError) and text else f"{type(err).__name__}: {text}"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
