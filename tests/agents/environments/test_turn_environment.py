"""Groups of episodes: played turn by turn, recorded token for token, restarted where the environment fails."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.agents.environments.played import Script, check_exact, engine_of, once, play, playing, said, task_of
from tests.agents.proxy.agent_model import SMOLLM2, Engine, write_model

from penstock.agents.environments.episode_environment import group_seed
from penstock.agents.environments.games.lookup import LOOKUP, value_of
from penstock.agents.environments.play import Play, Reply, Row, done, say
from penstock.agents.environments.turn_environment import TurnEnvironment
from penstock.agents.proxy.messages import Message
from penstock.protocol.config.environment_settings import EnvironmentDefinition
from penstock.protocol.config.run_file import load
from penstock.protocol.episode import Episode
from penstock.protocol.errors import ConfigError
from penstock.protocol.groups import RewardRequest, Sampling, Task
from penstock.protocol.trajectory import Group
from penstock.rollout_service.engines.completion import Completion
from penstock.rollout_service.environments.environment import build_group, load_environments
from penstock.rollout_service.errors import EngineError, TaskRefused
from penstock.rollout_service.settings import RolloutSettings


def test_every_turn_is_recorded_as_it_was_sampled(model: Path) -> None:
    """A right question and a right answer: both turns are trained under the tokens that the engine was given."""
    value = value_of(group_seed(task_of()), "37")
    (episode,), engine = play(model, LOOKUP, ["?37", value])
    assert (episode.status, episode.reward, dict(episode.reward_parts)) == ("done", 1.0, {"asked": 1.0})
    check_exact(episode, engine, model, ["?37", value])
    (row,) = episode.rows
    assert [turn.reward for turn in row.turns] == [0.0, 1.0]
    assert len({turn.state for turn in row.turns}) == 2
    assert [content for _, content in said(episode)] == ["get 37", "?37", value, value]


@pytest.mark.parametrize(
    ("script", "reward", "asked"),
    [(["?38", "00"], 0.0, 1.0), (["11"], 0.0, 0.0), (["?37", "?37"], 0.0, 1.0), (["what"], 0.0, 0.0)],
)
def test_another_question_or_answer_gets_nothing(model: Path, script: list[str], reward: float, asked: float) -> None:
    """A guess, a wrong key, a question asked twice, and text without form."""
    (episode,), _ = play(model, LOOKUP, script)
    assert (episode.status, episode.reward, dict(episode.reward_parts)) == ("done", reward, {"asked": asked})


def fails() -> Reply:
    raise OSError("the world is gone")


def times_out() -> Reply:
    raise TimeoutError("the tool gave up")


def test_an_episode_whose_environment_fails_is_begun_again_with_its_seed(model: Path) -> None:
    environment = Script(once(fails, done(0.5)))
    (episode,), _ = play(model, environment, ["a", "b"])
    assert (episode.status, episode.reward, episode.attempt) == ("done", 0.5, 1)
    assert environment.seeds == [group_seed(task_of())] * 2
    assert len(environment.closed) == 2


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (fails, "failed: OSError: the world is gone"),
        (times_out, "failed: TimeoutError: the tool gave up"),  # no deadline of ours: the policy did not spend the time
        (lambda: None, "step() must return a Reply, got NoneType"),
        (lambda: done(float("nan")), "reward is nan, expected a finite number"),
        (Reply, "a reply that is not the last must have at least one Message"),
        (
            lambda: Reply((Message("assistant", "x"),)),
            "the last of role user or tool; got a last message of role 'assistant'",
        ),
        (lambda: done(10**400), "expected a finite number"),
        (lambda: Reply(reward=float("nan"), is_done=True, parts={"reward": 1.0}), "reward is nan"),
        (lambda: Reply(is_done=True, parts=None), "Reply.parts must map names to numbers"),  # type: ignore[arg-type]
        (lambda: done(1.0, **{"a b": 1.0}), "reward part 'a b' is 1.0, expected a name"),
        (lambda: say("x", 1e308), "reward part 'reward' is inf"),  # the sum of two
        (lambda: say(None), "its messages or tools cannot be sent to a chat API: TypeError"),  # type: ignore[arg-type]
        (sys.exit, "failed: SystemExit"),
        (lambda: next(iter(())), "failed: StopIteration"),
        (lambda: (_ for _ in ()).throw(concurrent.futures.CancelledError()), "failed: CancelledError"),
    ],
)
def test_a_group_that_cannot_be_played_is_refused_with_the_reason(
    model: Path, step: Callable[[], Any], said: str
) -> None:
    """After all attempts; it is dead-lettered, and never gets a reward."""
    found, _ = play(model, Script(step), ["a"] * 9, max_turns=2)
    assert isinstance(found, TaskRefused)
    assert found.reason == "environment_failed"
    assert "0 of 1 episodes of mine could be played, 1 are needed; in each of 3 attempts" in str(found)
    assert said in str(found)


def test_a_play_that_fails_on_closing_has_been_played(model: Path) -> None:
    class Stuck(Script):
        def play(self, seed: int, row: Row, options: Any) -> Play:
            play = super().play(seed, row, options)
            play.close = times_out  # type: ignore[assignment,method-assign]
            return play

    (episode,), _ = play(model, Stuck(lambda: done(0.5)), ["a"])
    assert (episode.status, episode.reward, episode.attempt) == ("done", 0.5, 0)


def test_enough_episodes_make_a_group(model: Path) -> None:
    """With ``min_episodes`` a group goes on without those that could not be played; indices stay."""
    environment = Script(once(fails, done(1.0)))
    task = task_of(size=3).model_copy(update={"min_episodes": 2})
    found, _ = play(model, environment, ["a"] * 9, task, attempts=1)
    assert len(found) == 2
    group = build_group(task_of(size=3), found)
    assert isinstance(group, Group)
    assert {one.reward for one in found} == {1.0}


@pytest.mark.parametrize(
    ("more", "script", "status"),
    [({"max_turns": 2}, ["a", "b", "c"], "truncated"), ({"max_turns": 9}, ["a", "b"], "done")],
)
def test_the_turns_of_an_episode_are_limited(model: Path, more: dict[str, Any], script: list[str], status: str) -> None:
    environment = Script(lambda: say("on", 0.25), lambda: done(1.0) if status == "done" else say("on", 0.25))
    (episode,), _ = play(model, environment, script, **more)
    assert episode.status == status
    assert [turn.reward for turn in episode.rows[0].turns] == ([0.25, 1.0] if status == "done" else [0.25, 0.25])
    assert episode.is_trainable


def test_time_is_booked_to_who_spent_it(model: Path) -> None:
    """Slow answers end an episode that is trained; a slow environment has it restarted."""
    slow = Script(lambda: time.sleep(0.4) or done(1.0))
    found, _ = play(model, slow, ["a"] * 3, reply_deadline_s=0.05, attempts=2)
    assert isinstance(found, TaskRefused)
    assert "no reply within 0.05 s (reply_deadline_s)" in str(found)
    found, _ = play(model, slow, ["a"] * 3, episode_deadline_s=0.1, attempts=1)
    assert isinstance(found, TaskRefused)
    assert "timeout: not over after 0.1 s" in str(found)

    async def slowly() -> None:
        await asyncio.sleep(0.6)

    engine, quick = engine_of(model, ["a"] * 9, before=slowly), Script(lambda: say("on", 0.5))
    (episode,), _ = play(model, quick, [], engine=engine, episode_deadline_s=1.5)
    assert (episode.status, episode.time_spent_by, episode.is_trainable) == ("timeout", "policy", True)
    assert episode.reward == 0.5 * len(episode.turns)

    class Scored(Script):
        def play(self, seed: int, row: Row, options: Any) -> Play:
            play = super().play(seed, row, options)
            play.score = lambda: time.sleep(1.5) or 1.0  # type: ignore[assignment,method-assign]
            return play

    (episode,), _ = play(model, Scored(lambda: say("on")), ["a"] * 3, max_turns=1, episode_deadline_s=1.0)
    assert (episode.status, episode.reward) == ("truncated", 1.0)


def test_a_failure_of_the_engine_is_nobodys_reward(model: Path) -> None:
    class Broken:
        async def generate(self, prompts: Any, sampling: Sampling, n: int) -> list[list[Completion]]:
            raise EngineError("gone")

    with pytest.raises(EngineError, match="gone"):
        asyncio.run(playing(model, LOOKUP).rollout([task_of(size=2), task_of()], Broken()))


def test_no_more_episodes_are_played_at_once_than_allowed(model: Path) -> None:
    running, most = [0], [0]

    async def count() -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        await asyncio.sleep(0.01)
        running[0] -= 1

    engine = engine_of(model, ["a"] * 9, before=count)
    play(model, Script(lambda: done(1.0)), [], task_of(size=6), engine, max_running=2)
    assert most == [2]


def test_episodes_of_all_environments_share_the_places_of_the_worker(model: Path) -> None:
    """``worker.max_episodes`` counts those that wait for a tool too; the engine's places are free meanwhile."""
    running, most, asked = [0], [0], [0]

    class Waiting(Script):
        def play(self, seed: int, row: Row, options: Any) -> Play:
            running[0] += 1
            most[0] = max(most[0], running[0])
            return super().play(seed, row, options)

    async def tool() -> Reply:
        assert asked[0] < running[0], "the episode of this tool asks nothing"
        await asyncio.sleep(0.02)
        running[0] -= 1
        return done(1.0)

    async def answer() -> None:
        asked[0] += 1
        await asyncio.sleep(0)
        asked[0] -= 1

    class Placing(Engine):
        """Gives each episode a sampler of its own, and has them back at its end."""

        num_placed = num_left = 0

        @contextlib.contextmanager
        def in_episode(self) -> Iterator[Engine]:
            self.num_placed += 1
            yield self
            self.num_left += 1

    async def play_both() -> Placing:
        engine = engine_of(model, ["a"] * 12, Placing, before=answer)
        places, nowhere = asyncio.Semaphore(3), Nowhere()
        environments = [playing(model, Waiting(tool)) for _ in range(2)]
        for environment in environments:
            environment.use_worker(nowhere, places)
        await asyncio.gather(*(environment.rollout([task_of(size=6)], engine) for environment in environments))
        return engine

    engine = asyncio.run(play_both())
    assert most == [3]
    assert (engine.num_placed, engine.num_left, asked) == (12, 12, [0])


class Nowhere:
    """A store that has nothing and keeps nothing."""

    def take(self, task: Task) -> Sequence[Episode]:
        return ()

    async def keep(self, task: Task, episode: Episode, *, begun_at: float) -> None:
        pass


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("", "the prompt names 0 keys"),
        ("[1]", "not the JSON of a chat"),
        ("3", "not the JSON of a chat"),
        ("[" * 100_000, "not the JSON of a chat"),
        ('[{"role": "root", "content": "get 37"}]', "messages[0].role must be one of"),
        ('[{"role": "user", "content": 7}]', "messages[0].content"),
    ],
)
def test_a_task_with_hostile_messages_is_refused(model: Path, messages: str, said: str) -> None:
    found, engine = play(model, LOOKUP, ["a"], task_of().model_copy(update={"messages": messages}))
    assert isinstance(found, TaskRefused)
    assert said in str(found)
    assert not engine.prompts


def test_a_row_brings_its_calls_of_tools(model: Path) -> None:
    """As the chat completions API writes them, with ground truth and extra_info as values."""
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    chat = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "4", "tool_call_id": "a"}]
    reward = RewardRequest(name="environment", ground_truth="[4]", extra_info='{"level": 2}', data_source="sums")
    row = Row.of(task_of().model_copy(update={"messages": json.dumps(chat), "reward": reward}))
    assert [
        (message.role, [call.name for call in message.tool_calls], message.content) for message in row.messages
    ] == [("assistant", ["add"], ""), ("tool", [], "4")]
    assert (row.ground_truth, row.extra_info, row.data_source) == ([4], {"level": 2}, "sums")


def test_a_model_without_a_chat_template_is_refused_with_the_first_task(model: Path, tmp_path: Path) -> None:
    bare = write_model(tmp_path / "bare", SMOLLM2)
    (bare / "chat_template.jinja").unlink()
    engine = engine_of(model)
    found = asyncio.run(playing(bare, LOOKUP).rollout([task_of(), task_of()], engine))
    assert ["no chat template" in str(one) and isinstance(one, TaskRefused) for one in found] == [True, True]
    assert not engine.prompts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[environment.define.mine]\ntype = "lokup"\n', "lookup"),
        ('[environment.define.mine]\ntype = "lookup"\noptions = {size = 3}\n', "lookup has no options"),
        ('[environment.define.lookup]\ntype = "lookup"\n', "there is an environment of this name"),
        ('[environment.define.mine]\ntype = "single_turn"\n', "it is not one of several turns"),
        ('[environment.define.mine]\ntype = "lookup"\nanswer_format = "hermez"\n', "hermes"),
        ('[environment.define.mine]\ntype = "lookup"\nmax_turn = 3\n', "max_turns"),
    ],
)
def test_a_definition_that_cannot_be_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(RolloutSettings, files=[file])
    assert said in str(caught.value)


def test_a_defined_environment_has_its_own_limits() -> None:
    found = load_environments((), {"short": EnvironmentDefinition.model_validate({"type": "lookup", "max_turns": 2})})
    short, plain = found["short"], found["lookup"]
    assert isinstance(short, TurnEnvironment)
    assert isinstance(plain, TurnEnvironment)
    assert (short.name, short.settings.max_turns, plain.name, plain.settings.max_turns) == ("short", 2, "lookup", 16)


def test_options_may_hold_tables(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[environment.define.a]\ntype = "program"\noptions = { command = ["x"], variables = { A = "b" } }\n'
        '[environment.define.b]\ntype = "program"\n[environment.define.b.options]\ncommand = ["x"]\n'
        '[environment.define.b.options.variables]\nA = "b"\n'
    )
    overrides = ['environment.define.b.options.variables.C="d"']
    defined = load(RolloutSettings, files=[file], overrides=overrides).settings.environment.define
    assert defined["a"].options["variables"] == {"A": "b"}
    assert defined["b"].options["variables"] == {"A": "b", "C": "d"}
    file.write_text(
        '[environment.define.a]\ntype = "program"\noptions = { command = ["x"], variables = { A = { B = 1 } } }\n'
    )
    with pytest.raises(ConfigError, match=r"options: variables\.A: Input should be a valid string"):
        load(RolloutSettings, files=[file])


def test_a_definition_says_something_first_and_shortens_answers(model: Path) -> None:
    """Its system prompt is the first message, or begins that of the environment; no answer is longer than its limit."""
    settings = {"system_prompt": "Be brief.", "max_answer_tokens": 3}
    (episode,), engine = play(model, LOOKUP, ["?37", "0"], **settings)
    assert said(episode)[0] == ("system", "Be brief.")
    assert "Be brief." in engine.tokenizer.decode(engine.prompts[0])
    spoken = Script(lambda: done(1.0), start=lambda: [Message("system", "Rules."), Message("user", "go")])
    (episode,), _ = play(model, spoken, ["a b c d e f g"], **settings)
    assert said(episode)[0][1] == "Be brief.\n\nRules."
    assert [turn.end - turn.start for turn in episode.rows[0].turns] == [3]
    given = {"type": "program", "options": {"command": ["x"]}, "system_prompt": "Be brief."}
    definition = EnvironmentDefinition.model_validate(given)
    with pytest.raises(ConfigError, match="a program writes its own messages"):
        load_environments((), {"mine": definition})
