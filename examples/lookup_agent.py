"""An agent that knows nothing of Penstock but two variables: it talks to a model through the package `openai`, and looks words up.

`docs/agents.md` trains it. Its reward is 1 if the model's last answer is the row's ground truth.
"""

import json
import os
import pathlib
import re

import openai

VALUES = {"sun": "star", "moon": "rock"}


def main() -> None:
    """Ask, look up what the model wants to know, ask again; write the reward."""
    task = json.loads(pathlib.Path(os.environ["PENSTOCK_TASK"]).read_text())
    client = openai.OpenAI()  # the URL and the key are in OPENAI_BASE_URL and OPENAI_API_KEY
    messages = task["messages"]
    answer = ""
    for _ in range(4):
        answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content or ""
        question = re.fullmatch(r"\?\s*(\w+)", answer.strip())
        if question is None:
            break
        reply = VALUES.get(question[1], "unknown")
        messages = [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": reply}]
    reward = float(answer.strip() == task["ground_truth"])
    pathlib.Path(os.environ["PENSTOCK_RESULT"]).write_text(json.dumps({"reward": reward}))


if __name__ == "__main__":
    main()
