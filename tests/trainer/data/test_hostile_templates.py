"""Chat templates from strangers: nothing is executed, nothing runs or grows without end, all errors are ours."""

from __future__ import annotations

import os
import resource
import signal
from collections import UserDict
from datetime import UTC, datetime

import pytest

from penstock.protocol import chat_template
from penstock.protocol.chat_template import ChatTemplate
from penstock.protocol.errors import TemplateRefused

CHAT = [{"role": "user", "content": "hi"}]
DOUBLED = "{%% set n = namespace(x=%s) %%}{%% for i in range(60) %%}{%% set n.x = %s %%}{%% endfor %%}%s"

BIG = "{% set b = 'A' * 8000000 %}"
LAZY = BIG + "{{ range(100000)|map(attribute='x', default=b)|"
IN_LAZY = ("select('in', b~'c')|list", "max", "map('tojson')|join", "map('center', 9000000)|list")

LIMIT = "uses more than"  # of memory or of CPU time: which of them is reached first depends on the machine
REFUSED = {  # template -> part of the error
    # escapes from the sandbox
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "unsafe",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}": "unsafe",
    "{{ self.__init__.__globals__ }}": "unsafe",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}": "unsafe",
    "{{ (raise_exception|attr('__globals__')).os }}": "unsafe",
    "{{ namespace().__class__.__base__.__subclasses__() }}": "unsafe",
    "{{ messages.append(1) }}": "unsafe",
    "{{ messages[0].update(role='x') }}": "unsafe",
    "{% import 'os' as os %}{{ os }}": "no loader",
    "{% include '/etc/passwd' %}": "no loader",
    "{% extends '/etc/passwd' %}": "no loader",
    "{% debug %}": "unknown tag",
    # values that C code makes in one call, or out of what filters return lazily
    "{{ range(300)|map(attribute='x', default='A'*8000000)|join|length }}": "MiB of memory",
    **{f"{LAZY}{rest}|string|length }}}}": LIMIT for rest in IN_LAZY},
    BIG + "{{ range(9999)|map(attribute='x', default=[b])|sum(start=[])|map('list')|list }}": LIMIT,
    BIG + "{{ (b ~ b ~ b ~ b)|replace('', b) }}": LIMIT,
    BIG + "{{ '%s' * 100 % ((b,) * 100) }}": LIMIT,
    BIG + "{{ ('{0}' * 1000).format(b) }}": LIMIT,
    BIG + "{{ b.translate({65: b}) }}": LIMIT,
    BIG + "{{ b|wordwrap(1)|wordwrap(1)|wordwrap(1)|wordwrap(1) }}": LIMIT,
    BIG
    + "{% set d = dict() %}{% for i in range(99999) %}{% set d = dict(d, **{i|string: b}) %}{{ b }}{% endfor %}": LIMIT,
    BIG + "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = n.x + [b ~ i] %}{% endfor %}": LIMIT,
    BIG + "{% set c = cycler(b, b) %}{% for i in range(999) %}{{ c.next() }}{% endfor %}": LIMIT,
    "{{ ('\t' * 8000000).expandtabs(8000000)|length }}": LIMIT,
    "{{ ('http://a.b ' * 700000)|urlize }}": LIMIT,
    "{{ ([[[0] * 999] * 999] * 999)|pprint|length }}": LIMIT,
    "{{ ([[[0] * 999] * 999] * 999)|tojson(indent=9999) }}": LIMIT,
    "{{ strftime_now('%c' * 9999999)|length }}": LIMIT,
    "{{ (9 ** 9999999) // 7 ** 99999 }}": LIMIT,
    "{% set x = range(99999)|list %}{{ range(99999)|select('in', x|reverse|list)|list|length }}": LIMIT,
    "{% macro m(a) %}{{ a }}{{ a }}{% endmacro %}" + DOUBLED % ("'a'", "m(n.x)", ""): LIMIT,
    "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    + "{% call m() %}" * 60
    + "a"
    + "{% endcall %}" * 60: LIMIT,
    # texts and lists without end
    **{
        f"{{{{ {value} }}}}": LIMIT
        for value in (
            "'a' * 10**11",
            "([0] * 10**10)|length",
            "'a'|center(10**11)",
            "'a\nb'|indent(10**10)",
            "[1]|tojson(indent=10**10)",
            "'%99999999999d' % 1",
            "'{:>99999999999}'.format(1)",
            "'a'.zfill(10**10)",
        )
    },
    "{% set a = 'a' * 1000000 %}{{ a.replace('a', a) }}": LIMIT,
    "{% set a = 'a' * 1000000 %}{{ range(99999)|join(a) }}": LIMIT,
    "{% set a = 'a' * 1000000 %}{% for i in range(99999) %}{{ a }}{% endfor %}": LIMIT,
    "{% set a = 'a' * 1000000 %}{% set b %}{% for i in range(99999) %}{{ a }}{% endfor %}{% endset %}": LIMIT,
    "{{ 'a' * 9000000 }}": "9000000 characters, the limit is",
    DOUBLED % ("'a'", "n.x ~ n.x", ""): LIMIT,
    DOUBLED % ("[0]", "n.x + n.x", ""): LIMIT,
    DOUBLED % ("[0]", "[n.x, n.x]", "{{ n.x|tojson }}"): LIMIT,
    DOUBLED % ("[0]", "{'a': n.x, 'b': n.x}", "{{ n.x }}"): LIMIT,
    DOUBLED % ("2", "n.x * n.x", ""): LIMIT,
    # loops without end
    "{% for i in range(10**9) %}{% endfor %}": "Range too big",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "CPU time",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}": LIMIT,
    "{% for x in messages recursive %}{{ loop(messages) }}{{ loop(messages) }}{% endfor %}": "RecursionError",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError",
    "{{ lipsum(n=10**6) }}": "undefined",
    # errors of other kinds
    "{{ 9 ** 9999 }}": "not valid Jinja",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}": "not valid Jinja",
    "{% if 1 %}" * 500 + "{% endif %}" * 500: "not valid Jinja",
    "{{ 1 // 0 }}": "ZeroDivisionError",
    "{{ 2.0 ** 10000 }}": "OverflowError",
    "{{ messages[0].content.index('zzz') }}": "ValueError",
    "{{ messages[5].content.x }}": "no element 5",
    "{{ '\\ud800' }}": "lone surrogate",
    "x" * (chat_template.MAX_TEMPLATE_CHARS + 1): "the limit is",
}


@pytest.mark.parametrize("template", REFUSED, ids=lambda text: text[:60].encode("ascii", "replace").decode())
def test_a_hostile_template_is_refused(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Escapes, texts and loops without end, and errors of any kind end as one error that says why."""
    monkeypatch.setattr(chat_template, "MAX_CPU_S", 0.1 if REFUSED[template] in (LIMIT, "CPU time") else 5.0)
    with pytest.raises(TemplateRefused) as caught:
        ChatTemplate(template).render(CHAT)
    assert REFUSED[template] in str(caught.value)
    assert "\n" not in str(caught.value)


def process_of(template: str) -> int:
    return chat_template._PROCESSES[template]._process.pid


def test_the_kernel_limits_the_memory_of_the_process_that_renders() -> None:
    ChatTemplate("limited").render(CHAT)
    assert resource.prlimit(process_of("limited"), resource.RLIMIT_AS) == (chat_template.MAX_BYTES,) * 2


def test_a_process_that_was_killed_while_idle_is_replaced() -> None:
    """A refusal would blame the template for what the machine did; also a fork renders with a process of its own."""
    template = ChatTemplate("{{ messages[0].role }}")
    os.kill(process_of("{{ messages[0].role }}"), signal.SIGKILL)
    assert template.render(CHAT) == "user"
    if (pid := os.fork()) == 0:
        os._exit(0 if template.render(CHAT) == "user" else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert template.render([UserDict(CHAT[0])]) == "user"
    with pytest.raises(TemplateRefused, match="got datetime"):
        template.render([{"role": datetime.now(UTC)}])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{{ loop.index ~ m.role ~ none ~ m.missing }}{% endfor %}", "1userNone"),
        ("{% for a, b in [(1, 2), (3, 4)] %}{{ a * b }} {% endfor %}", "2 12 "),
        ("{{ '%5d|%-3s|' % (7, 'a') }}{{ '{:>4}'.format('b') }}", "    7|a  |   b"),
        ("{{ messages|map(attribute='content')|join(', ')|upper|indent(2, true) }}", "  HI"),
        ("{{ ({'a': [1, 2]}, 'é')|tojson(indent=1) }}", '[\n {\n  "a": [\n   1,\n   2\n  ]\n },\n "é"\n]'),
        ("{% set ns = namespace(n=0) %}{% for i in range(9) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "36"),
        ("{{ messages[0].content.replace('h', 'H').split('i')[0] + '-' * 3 + (2 ** 10)|string }}", "H---1024"),
        ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m('a') + m('b') }}{% set s %}c{% endset %}{{ s }}", "<a><b>c"),
        ("{{ raise_exception|attr('__globals__') }}{{ ('{m.__class__}'|attr('format_map'))({'m': 1}) }}", ""),
    ],
)
def test_a_usual_template_is_unchanged_by_the_limits(template: str, expected: str) -> None:
    """Loops, formats, filters, macros and namespaces give what Jinja gives."""
    assert ChatTemplate(template).render(CHAT) == expected
