"""An agent of the framework `openai-agents` with a tool; it knows nothing of Penstock but two variables.

`docs/agents.md` trains it. Its reward is 1 if its last answer is the row's ground truth.
"""

import json
import os
import pathlib

from agents import Agent, AgentsException, Runner, function_tool

MEANINGS = {"sun": "star", "moon": "rock"}


@function_tool
def look_up(word: str) -> str:
    """Look a word up in the dictionary."""
    return MEANINGS.get(word, "unknown")


def main() -> None:
    """Run the agent on the row's question; write the reward."""
    task = json.loads(pathlib.Path(os.environ["PENSTOCK_TASK"]).read_text())
    agent = Agent(
        name="dictionary", instructions="Look the word up, then say what it is.", tools=[look_up], model="policy"
    )
    try:  # the URL and the key are in OPENAI_BASE_URL and OPENAI_API_KEY
        answer = str(Runner.run_sync(agent, task["messages"][-1]["content"], max_turns=4).final_output)
    except (
        AgentsException
    ) as err:  # too many turns, or a tool that is none: the policy's doing, no error of the program
        answer = f"{type(err).__name__}: {err}"
    reward = float(answer.strip() == task["ground_truth"])
    pathlib.Path(os.environ["PENSTOCK_RESULT"]).write_text(json.dumps({"reward": reward}))


if __name__ == "__main__":
    main()
