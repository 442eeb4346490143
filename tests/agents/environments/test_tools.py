"""The environment `tools`: each call gets a text, each answer is recorded as sampled, and what is wrong is counted."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.agents.environments.played import call, check_exact, engine_of, results, rolled, said, task_of

from penstock.agents.environments.play import Reply, Row
from penstock.agents.environments.shared_options import CallOptions, shortened
from penstock.agents.environments.tools.built_in.calculator import CALCULATOR_TOOL
from penstock.agents.environments.tools.built_in.python import PYTHON_TOOL
from penstock.agents.environments.tools.built_in.search import Bm25, Passage, divided, read_corpus
from penstock.agents.environments.tools.tool import Tool, ToolArguments, ToolEpisode, ToolError, ToolUnavailable
from penstock.agents.environments.tools.toolbox import Toolbox, is_right
from penstock.agents.environments.tools.tools_environment import Tools, ToolsPlay
from penstock.agents.proxy.messages import Message, ToolCall
from penstock.protocol.config.environment_settings import EnvironmentDefinition
from penstock.protocol.errors import ConfigError
from penstock.rollout_service.environments.environment import load_environments
from penstock.rollout_service.errors import TaskRefused

OWN = '''
from penstock import Tool, ToolArguments, ToolEpisode, ToolError


class HeightArguments(ToolArguments):
    name: str


class Height(Tool):
    """A tool of a user."""

    name = "height"
    description = "Return the height of a mountain in metres."
    arguments = HeightArguments

    def call(self, arguments: HeightArguments, episode: ToolEpisode) -> str:
        if arguments.name not in episode.row.extra_info:
            raise ToolError(f"{arguments.name} is not known")
        return str(episode.row.extra_info[arguments.name])


HEIGHT = Height()
'''
EPISODE = ToolEpisode(7, Row((Message("user", "?"),), "12", {"Rigi": 1798}, ""))


def define(folder: Path, options: dict[str, Any], **settings: Any) -> Tools:
    """Return an environment of a run file, with the tool of `OWN`."""
    (folder / "own_tools.py").write_text(OWN)
    tools = {f"{folder}/own_tools.py:HEIGHT": {}, "calculator": {}}
    definition = EnvironmentDefinition(type="tools", options={"tools": tools, **options}, **settings)
    made = load_environments((), {"mine": definition})["mine"]
    assert isinstance(made, Tools)
    return made


def play_of(environment: Tools, truth: Any = "12") -> ToolsPlay:
    row = Row((Message("system", "Be brief."), Message("user", "How high?")), truth, {"Rigi": 1798}, "")
    play = environment.play(7, row, environment.chosen)
    asyncio.run(play.start())
    return play


def calls(*made: tuple[str, Any]) -> Message:
    """Return an answer that calls tools; arguments that are a text are that text."""
    texts = [given if isinstance(given, str) else json.dumps(given) for _, given in made]
    return Message("assistant", tool_calls=tuple(ToolCall(f"c{n}", one[0], texts[n]) for n, one in enumerate(made)))


def step(play: ToolsPlay, answer: Message | str) -> Reply:
    return asyncio.run(play.step(Message("assistant", answer) if isinstance(answer, str) else answer))


def answered(
    tools: Sequence[Tool], answer: Message, allowed: int = 64, *, deadline_s: float = 60.0, longest: int = 200
) -> Any:
    """Return what a toolbox answers to the calls of an answer."""
    toolbox = Toolbox(
        {tool.name: tool for tool in tools}, CallOptions(call_deadline_s=deadline_s, max_output_chars=longest)
    )

    async def run() -> Any:
        toolbox.prepare()
        try:
            return await toolbox.answer(answer.tool_calls, allowed, EPISODE, {})
        finally:
            await toolbox.close()

    return asyncio.run(run())


def tool_of(name: str, function: Callable[[Any], Any], **more: Any) -> Tool:
    """Return a tool without arguments that does what a function does, plain or as a coroutine."""

    def plain(self: Tool, arguments: Any, episode: ToolEpisode) -> Any:
        return function(arguments)

    async def awaited(self: Tool, arguments: Any, episode: ToolEpisode) -> Any:
        return await function(arguments)

    method = awaited if inspect.iscoroutinefunction(function) else plain
    return type(name, (Tool,), {"name": name, "description": "Do.", "call": method, **more})()


async def gone(_: Any) -> str:
    raise ToolUnavailable("the server of the tool is gone")


async def slow(_: Any) -> str:
    await asyncio.sleep(60)
    return ""


SLOW = tool_of("slow", slow)
TASK = task_of("Rigi + 12?", ground_truth='"1810"', extra_info='{"Rigi": 1798}')


def test_calls_are_answered_and_every_token_is_recorded_as_it_was_sampled(tool_model: Path, tmp_path: Path) -> None:
    """Two calls in any spelling, a call that cannot be read, an answer: one row, sampled tokens alone are trained."""
    environment = define(tmp_path, {"answer": "number", "format_penalty": -0.25, "call_reward": -0.01}, max_turns=4)
    script = [
        'I ask.\n<tool_call>{"name":"height","arguments":{"name":"Rigi"}}</tool_call>'
        '<tool_call>\n{"arguments": {"expression": "1798+12"}, "name": "calculator"}\n</tool_call>',
        '<tool_call>{"name": "calculator", </tool_call>',
        "1,810",
    ]
    engine = engine_of(tool_model, script)
    environment.use_model(tool_model, 8192)
    (episode,) = asyncio.run(rolled(environment, engine, TASK))
    assert (episode.status, round(episode.reward or 0, 9)) == ("done", 0.73)
    assert dict(episode.reward_parts) == {"calls": 2.0, "unparsed_calls": 1.0, "success": 1.0}
    (row,) = episode.rows
    assert [round(turn.reward, 9) for turn in row.turns] == [-0.02, -0.25, 1.0]
    assert len({turn.state for turn in row.turns}) == 3
    check_exact(episode, engine, tool_model, script)
    chat = said(episode)
    assert [role for role, _ in chat] == ["user", "assistant", "tool", "tool", "assistant", "user", "assistant"]
    assert results(episode) == ["1798", "1810"]
    assert "cannot be read" in chat[5][1]
    prompt = engine.tokenizer.decode(engine.prompts[0])
    assert '"name": "height"' in prompt
    assert '"expression"' in prompt


def test_a_tool_that_cannot_answer_begins_the_episode_again(tool_model: Path, tmp_path: Path) -> None:
    """An outage is no error of the policy; after all attempts the group has a reason, and no reward of 0."""
    environment = define(tmp_path, {}, attempts=2)
    assert environment._toolbox is not None
    environment._toolbox.tools["calculator"] = tool_of("calculator", gone)
    environment.use_model(tool_model, 8192)
    engine = engine_of(tool_model, [call("calculator")] * 4)
    found = asyncio.run(rolled(environment, engine, TASK))
    assert isinstance(found, TaskRefused)
    assert "the server of the tool is gone" in str(found)
    assert len(engine.prompts) == 2


RAISED = {"raise": ZeroDivisionError("by zero"), "refuse": ToolError("not today"), "timeout": TimeoutError("its own"),
          "exit": SystemExit(3), "stop": StopIteration()}  # fmt: skip


class Faulty(Tool):
    name = "faulty"
    description = "Do as told."

    class Arguments(ToolArguments):
        act: str
        count: int = 0

    arguments = Arguments
    held = threading.Event()

    def call(self, arguments: Any, episode: ToolEpisode) -> str:
        if arguments.act in RAISED:
            raise RAISED[arguments.act]
        if arguments.act == "surrogate":
            return "\ud800"
        if arguments.act == "hang":
            self.held.wait(60)
        return arguments.act * max(arguments.count, 1)


@pytest.mark.parametrize(
    ("made", "text", "counted"),
    [
        (("nothing", {}), "error: there is no tool 'nothing'; tools: faulty, slow", "unknown_tools"),
        (("faulty", "{"), "error: wrong arguments of faulty: all: Invalid JSON", "bad_arguments"),
        (("faulty", "[" * 5000), "error: wrong arguments of faulty", "bad_arguments"),
        (("faulty", {"count": 1}), "error: wrong arguments of faulty: act: Field required", "bad_arguments"),
        (("faulty", {"act": "x", "more": 1}), "more: Extra inputs are not permitted", "bad_arguments"),
        (("faulty", {"act": "x", "count": "many"}), "count: Input should be a valid integer", "bad_arguments"),
        (("faulty", {"act": "raise"}), "error: ZeroDivisionError: by zero", "tool_errors"),
        (("faulty", {"act": "refuse"}), "error: not today", "tool_errors"),
        (("faulty", {"act": "timeout"}), "error: TimeoutError: its own", "tool_errors"),
        (("faulty", {"act": "exit"}), "error: SystemExit: 3", "tool_errors"),
        (("faulty", {"act": "stop"}), "error: StopIteration: ", "tool_errors"),
        (("faulty", {"act": "ab", "count": 30}), "abababababababababab\n[40 characters left out]", "shortened_outputs"),
        (("faulty", {"act": "surrogate"}), "?", ""),
    ],
)
def test_whatever_is_wrong_with_a_call_the_policy_reads_a_text(made: tuple[str, Any], text: str, counted: str) -> None:
    """Beside it, a good call is answered; each kind is counted once."""
    good = ("faulty", {"act": "fine", "count": "1"})
    found = answered([Faulty(), SLOW], calls(made, good), longest=20 if "left" in text else 200)
    assert text in found.messages[0].content
    assert [message.tool_call_id for message in found.messages] == ["c0", "c1"]
    assert found.messages[1].content == "fine"
    assert found.counts == {"calls": 2, **({counted: 1} if counted else {})}


@pytest.mark.parametrize(("name", "given"), [("faulty", {"act": "hang"}), ("slow", {})])
def test_a_call_that_takes_too_long_is_an_error(name: str, given: dict[str, Any]) -> None:
    Faulty.held.clear()
    found = answered([Faulty(), SLOW], calls((name, given)), deadline_s=0.2)
    Faulty.held.set()
    assert found.messages[0].content == f"error: {name} gave no answer within 0.2 s"
    assert found.counts == {"calls": 1, "timed_out_calls": 1}


def test_calls_of_one_answer_run_beside_each_other() -> None:
    meeting = threading.Barrier(2)
    meets = tool_of("meets", lambda _: meeting.wait(60.0) is None or "met")
    found = answered([meets], calls(*[("meets", {})] * 2))
    assert [message.content for message in found.messages] == ["met", "met"]


def test_calls_beyond_the_limits_are_refused() -> None:
    made: list[str] = []
    counts = tool_of("faulty", lambda given: made.append(given.act) or given.act, arguments=Faulty.Arguments)
    for allowed in (0, 2):
        made.clear()
        found = answered([counts], calls(*[("faulty", {"act": name}) for name in "abc"]), allowed)
        refused = ["error: not done, because there were too many calls"] * (3 - allowed)
        assert [message.content for message in found.messages] == [*"abc"[:allowed], *refused]
        assert sorted(made) == [*"abc"[:allowed]]
        assert found.counts == {"calls": 3, "refused_calls": 3 - allowed}


def test_a_call_that_waits_for_a_place_is_not_out_of_time() -> None:
    async def wait(_: Any) -> str:
        await asyncio.sleep(0.3)
        return "done"

    began = time.monotonic()
    found = answered([tool_of("single", wait, max_running=1)], calls(*[("single", {})] * 4), deadline_s=20.0)
    assert time.monotonic() - began >= 1.1
    assert {message.content for message in found.messages} == {"done"}


def test_a_tool_answers_with_a_text() -> None:
    with pytest.raises(ToolUnavailable, match="number returned int, expected a text"):
        answered([tool_of("number", lambda _: 3)], calls(("number", {})))


def test_penalties_limits_and_patterns(tmp_path: Path) -> None:
    """Bad calls cost the penalty, calls their price; those beyond the limits are refused; a repeated call ends it."""
    environment = define(
        tmp_path,
        {
            "answer": "number", "action_pattern": "<answer>(.*?)</answer>", "format_penalty": -0.5, "call_reward": -0.1,
            "max_calls": 3, "max_parallel_calls": 2, "min_turns": 2, "repeat_limit": 3, "system": "Call {tools}",
            "note": "{turns_left} left, answer {turn}",
        },
        max_turns=6,
    )  # fmt: skip
    assert environment._toolbox is not None
    height = ("height", {"name": "Rigi"})
    play = play_of(environment)
    first = asyncio.run(play.start())
    assert first[0].content.startswith('Call {"type": "function"')
    assert first[0].content.endswith("\n\nBe brief.")
    early = step(play, "<answer>12</answer>")
    assert (early.is_done, early.reward, dict(early.parts)) == (False, -0.5, {"early_answers": 1.0})
    assert early.messages[0].content.endswith("\n5 left, answer 2")
    three = step(play, calls(height, ("calculator", {"expression": "1+"}), height))
    assert [message.content.split("\n")[0] for message in three.messages] == [
        "1798", "error: the expression cannot be read", "error: not done, because there were too many calls",
    ]  # fmt: skip
    assert (round(three.reward, 9), dict(three.parts)) == (
        -0.3,
        {"calls": 3.0, "tool_errors": 1.0, "refused_calls": 1.0},
    )
    wrong = step(play, calls(("heights", {}), ("calculator", {"expression": "2*2"})))
    assert (round(wrong.reward, 9), wrong.is_done) == (-0.7, False)
    assert [message.content.split("\n")[0] for message in wrong.messages][1].startswith("error: not done")
    repeated = step(play, calls(("height", '{ "name" : "Rigi" }')))
    assert (repeated.is_done, repeated.parts["repeated"], repeated.parts["refused_calls"]) == (True, 1.0, 1.0)
    for answer, reward, parts in (
        ("<answer> 12.0 </answer>", 1.0, {"success": 1.0}), ("<answer>13</answer>", 0.0, {"success": 0.0}),
        ("12", -0.5, {"success": 0.0, "malformed": 1.0}),
    ):  # fmt: skip
        last = play_of(environment)
        step(last, calls(height))
        found = step(last, answer)
        assert (found.is_done, found.reward, dict(found.parts)) == (True, reward, parts)
    both = Message("assistant", tool_calls=calls(height).tool_calls, unparsed_calls=2)
    mixed = step(play_of(environment), both)
    assert mixed.messages[0].content.startswith("1798\nerror: 2 more calls cannot be read")
    assert (round(mixed.reward, 9), mixed.parts["unparsed_calls"]) == (-0.6, 2.0)
    asyncio.run(environment.close())


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        ({"tools": {"calculators": {}}}, {}, "unknown tool 'calculators'; did you mean 'calculator'"),
        ({"tools": {"calculator": {"digits": 3}}}, {}, r"options\.tools\.calculator: digits: .*has no options"),
        ({"tools": {"search": {}}}, {}, r"options\.tools\.search: corpus: Field required; search has corpus, top"),
        ({"tools": {}}, {}, "write tools, or servers that have some"),
        (
            {},
            {"reply_deadline_s": 30.0},
            r"reply_deadline_s = 30: expected more than 30, which is options\.call_deadline_s",
        ),
        ({"servers": {"a": {"command": ["x"]}}}, {"reply_deadline_s": 40.0}, "= 40: expected more than 40"),
        ({"call_reward": 1.0}, {}, "call_reward"),
    ],
)
def test_wrong_definitions_are_refused(
    tmp_path: Path, options: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        define(tmp_path, options, **settings)


def test_rows_that_cannot_be_played_are_refused(tmp_path: Path) -> None:
    """Without tools, without a question, or without what the answer is compared with."""
    environment = define(tmp_path, {"answer": "number"})
    with pytest.raises(ValueError, match="expected a number"):
        play_of(environment, "twelve")
    with pytest.raises(ValueError, match="ground_truth is 'None'"):
        play_of(environment, None)
    with pytest.raises(ValueError, match="its last message does not have the role user"):
        environment.play(0, Row((), 1, {}, ""), environment.chosen)
    with pytest.raises(ValueError, match="tools is not played without options"):
        Tools().play(0, EPISODE.row, environment.chosen)


@pytest.mark.parametrize(
    ("answer", "truth", "scoring", "expected"),
    [
        (" Zug ", "zug", "text", True), ("Zug  city", ["Bern", "zug CITY"], "text", True),
        ("Zug", "Bern", "text", False), ("three", 3, "number", False),
        ("1,024", 1024, "number", True), ("1024.", "1024", "number", True), ("1024.5", 1024, "number", False),
        ("0.3333333", "0.33333333", "number", True), ("0.333", "0.33333333", "number", False),
    ],
)  # fmt: skip
def test_the_last_answer_is_compared(answer: str, truth: Any, scoring: Any, expected: bool) -> None:
    assert is_right(answer, truth, scoring) is expected


def test_outputs_are_shortened_where_the_run_file_says() -> None:
    assert shortened("abcdef", 6, "end") == "abcdef"
    assert shortened("abcdef", 4, "end") == "abcd\n[2 characters left out]"
    assert shortened("abcdef", 4, "start") == "[2 characters left out]\ncdef"
    assert shortened("abcdef", 3, "middle") == "ab\n[3 characters left out]\nf"
    assert shortened("abcdef", 1, "middle") == "a\n[5 characters left out]\n"


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("2+3*4", "14"), ("(1.5+2)*2", "7"), ("1/3", "0.333333333333"), ("0.1+0.2", "0.3"), ("7//2 - 7%2", "2"),
        ("2**100", str(2**100)), ("2**-1", "0.5"), ("10**-30", "1E-30"), ("(.5 + 1.5)*2", "4"),
        ("12345678901234567890.0 + 1.", "12345678901234567891"),
    ],
)  # fmt: skip
def test_the_calculator_is_exact(expression: str, text: str) -> None:
    arguments = CALCULATOR_TOOL.arguments.model_validate({"expression": expression})
    assert CALCULATOR_TOOL.call(arguments, EPISODE) == text


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("1/0", "division by zero"),
        *((text, "an exponent is a whole number") for text in ("2**0.5", "2**5000", "9**9**9")),
        *((text, "the value is too large") for text in ("99**1000", "9**999 * 9**999")),
        *((text, "an expression consists of numbers") for text in ("x", "2^9", "__import__('os')", "1,2", "2(3)")),
        *((text, "the expression cannot be read") for text in ("", "9//", "(" * 150)),
        ("1" * 201, "the expression has 201 characters"),
    ],
)
def test_the_calculator_executes_nothing_and_has_limits(expression: str, said: str) -> None:
    with pytest.raises(ToolError, match=said):
        CALCULATOR_TOOL.call(CALCULATOR_TOOL.arguments.model_validate({"expression": expression}), EPISODE)


def test_bm25_is_its_formula() -> None:
    index = Bm25(["red apple", "red red car drives", "Green tree"])
    idf_red, idf_car = math.log(1 + 1.5 / 2.5), math.log(1 + 2.5 / 1.5)
    mean = 8 / 3
    apple = idf_red * 2.2 / (1 + 1.2 * (0.25 + 0.75 * 2 / mean))
    norm = 1.2 * (0.25 + 0.75 * 4 / mean)
    car = idf_red * 2 * 2.2 / (2 + norm) + idf_car * 2.2 / (1 + norm)
    assert index.best("RED car red", 5) == [(1, pytest.approx(car)), (0, pytest.approx(apple))]
    assert index.best("green", 5)[0][0] == 2
    assert index.best("blue", 5) == []
    assert [place for place, _ in Bm25(["a b", "a b", "a b"]).best("b", 2)] == [0, 1]


def test_a_corpus_is_a_folder_or_a_file_of_lines(tmp_path: Path) -> None:
    """Texts are divided at empty lines, and within a paragraph only where it is too long."""
    (tmp_path / "texts" / "more").mkdir(parents=True)
    (tmp_path / "texts" / "a.md").write_text("First.\n\nSecond one.\n\n" + "word " * 30)
    (tmp_path / "texts" / "more" / "b.txt").write_text("Berne")
    (tmp_path / "texts" / "c.bin").write_bytes(b"\xff")
    found = read_corpus(tmp_path / "texts", 50)
    assert found[0] == Passage("a.md", "First.\n\nSecond one.")
    assert found[-1] == Passage("more/b.txt", "Berne")
    assert all(len(one.text) <= 50 for one in found)
    assert "".join(one.text for one in found[1:-1]).replace(" ", "") == "word" * 30
    lines = tmp_path / "c.jsonl"
    lines.write_text('{"title": "Zug", "text": "A town."}\n\n{"id": 1, "contents": "\\"Rigi\\"\\nA mountain."}\n')
    assert read_corpus(lines, 50) == [Passage("Zug", "A town."), Passage("Rigi", "A mountain.")]
    assert list(divided("", 10)) == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.jsonl", b"{", r"c\.jsonl:1: not JSON"), ("c.jsonl", b"[]\n", "expected an object, got list"),
        ("c.jsonl", b'{"text": 3}', "with texts"), ("c.jsonl", b'{"body": "x"}', "with texts"),
        ("c.jsonl", b"", "no text in it"), ("c.jsonl", b"\xff", "not UTF-8"), ("c.csv", b"x", "ends in .jsonl"),
    ],
)  # fmt: skip
def test_a_corpus_that_cannot_be_read_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    environment = define(tmp_path, {"tools": {"search": {"corpus": str(tmp_path / name)}}})
    with pytest.raises(ConfigError, match=message):
        environment.use_model(tmp_path, None)


def test_search_returns_the_best_passages(tmp_path: Path) -> None:
    """Numbered, with their titles; a question without a word of the corpus gets none."""
    corpus = tmp_path / "c.jsonl"
    corpus.write_text("\n".join(json.dumps({"title": f"t{n}", "text": f"about {n} and {n}"}) for n in range(5)))
    environment = define(tmp_path, {"tools": {"search": {"corpus": str(corpus), "top": 1}}})
    play = play_of(environment)
    found = step(play, calls(("search", {"query": "3"}), ("search", {"query": "nothing"})))
    assert [message.content for message in found.messages] == [
        "[1] t3: about 3 and 3",
        "no passage holds any of these words",
    ]
    asyncio.run(environment.close())


PROGRAMS = {
    "value": ("x = 20\nx + 1", "21"),
    "printed": ("print('hello', end='')\nNone", "hello"),
    "silent": ("x = 1", "(it printed nothing)"),
    "text": ("'\U0001f600\\n' + 'é'", "'\U0001f600\\né'"),
    "braces": ("{'a': 1}['a'], f'{2}'", "(1, '2')"),
    "raised": ("def f():\n    return 1 / 0\nprint('before')\nf()", "error: before\n"),
    "syntax": ("def f(:", "SyntaxError"),
    "exit": ("import sys; sys.exit(3)", "error: it ended with exit code 3"),
    "network": ("import socket; socket.create_connection(('127.0.0.1', 1))", "error: "),
    "files": ("open('/etc/passwd').read()", "error: "),
    "forever": ("while True: pass", "error: stopped: it used up its CPU time"),
    "memory": ("x = bytearray(1 << 30)", "error: stopped: it used up its memory"),
}


@pytest.fixture(scope="module")
def programs() -> dict[str, str]:
    """What the tool `python` says to each program, in the sandbox that works here."""
    tool = PYTHON_TOOL.with_options({"cpu_s": 1, "memory_mb": 256}, "options")
    made = calls(*[("python", {"code": code}) for code, _ in PROGRAMS.values()])
    found = answered([tool], made, deadline_s=120.0, longest=2000)
    return dict(zip(PROGRAMS, (message.content for message in found.messages), strict=True))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_in_the_sandbox(programs: dict[str, str], name: str) -> None:
    """Its output and its last value come back; errors name the policy's own line; nothing outside can be reached."""
    assert PROGRAMS[name][1] in programs[name]
    if name == "raised":
        assert 'File "<call>", line 2, in f' in programs[name]
        assert programs[name].endswith("ZeroDivisionError: division by zero")
        assert "program.py" not in programs[name]
    if name in ("network", "files"):
        assert "root:" not in programs[name]


def test_a_link_out_of_a_corpus_is_refused(tmp_path: Path) -> None:
    """The policy would read what it leads to, and packs would store it; within the corpus a link is a file."""
    folder, secret = tmp_path / "texts", tmp_path / "id_rsa.txt"
    folder.mkdir()
    secret.write_text("PRIVATE")
    (folder / "a.md").write_text("Berne")
    (folder / "b.md").symlink_to("a.md")
    assert len(read_corpus(folder, 50)) == 2
    for target in (secret, Path("../id_rsa.txt")):
        (folder / "notes.txt").symlink_to(target)
        with pytest.raises(ConfigError, match=r"notes\.txt links to .*id_rsa\.txt, outside of the folder"):
            read_corpus(folder, 50)
        (folder / "notes.txt").unlink()
