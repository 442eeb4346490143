"""The built-in formats, each by what its columns mean; that of Alpaca joins columns."""

from typing import Any

from penstock.trainer.data.messages import Chat, refuse, shown
from penstock.trainer.row_format import RowFormat

# A chat whose last assistant message, if it ends with one, is the answer.
MESSAGES = RowFormat(
    name="messages",
    columns="messages (chat); a last assistant message is what SFT imitates",
    required=("messages",),
    precedence=10,
    prompt="messages",
    is_whole_chat=True,
)

# Rows of verl: a chat in prompt, and the rule and right answer in reward_model.
VERL = RowFormat(
    name="verl",
    columns="prompt (chat), reward_model {style, ground_truth}, data_source, extra_info",
    trains="GRPO",
    required=("prompt", "reward_model"),
    precedence=20,
)

# A prompt and its right answer, each in a column.
FLAT = RowFormat(
    name="flat",
    columns="prompt (text or chat), ground_truth, data_source",
    trains="GRPO",
    required=("prompt", "ground_truth"),
    unless=("completion", "response"),
    precedence=30,
)

# Rows of TRL: a prompt, alone or with what completes it.
TRL = RowFormat(
    name="trl", columns="prompt (text or chat), or with completion or response", required=("prompt",), precedence=40
)

# A question and its answer, which is the ground truth.
QUESTION_ANSWER = RowFormat(
    name="question_answer",
    columns="question, answer; the answer is the ground truth",
    required=("question", "answer"),
    precedence=50,
    prompt="question",
    ground_truth="answer",
)

# Rows of xLAM and APIGen: a query, and in answers the calls that answer it, of the tools.
XLAM = RowFormat(
    name="xlam",
    columns="query, answers (JSON text of calls), tools",
    required=("query", "answers", "tools"),
    precedence=55,
    prompt="query",
    calls="answers",
)

# Rows of ShareGPT: a chat of from and value in conversations.
SHAREGPT = RowFormat(
    name="sharegpt",
    columns="conversations (chat of from and value, or role and content)",
    required=("conversations",),
    precedence=60,
    prompt="conversations",
    is_whole_chat=True,
)

# Rows of OpenRLHF: input with output or label, and datasource.
OPENRLHF = RowFormat(
    name="openrlhf",
    columns="input (text or chat), with output, label or datasource",
    required=("input",),
    precedence=80,
    prompt="input",
    answer="output",
    ground_truth="label",
    data_source="datasource",
)


def _extend(row: dict[str, Any], chat: Chat) -> Chat:
    more = row.get("input", "")
    if not isinstance(more, str):
        refuse("input", "expected a text", shown(more))
    if more:
        *before, last = chat
        content, more = last["content"], f"\n{more}"
        whole = content + more if isinstance(content, str) else [*content, {"type": "text", "text": more}]
        chat = (*before, {**last, "content": whole})
    return (*_earlier_turns(row.get("history") or []), *chat)


def _earlier_turns(pairs: Any) -> Chat:
    if not isinstance(pairs, list):
        refuse("history", "expected a list of pairs of texts", shown(pairs))
    for number, pair in enumerate(pairs):
        if not (isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            refuse(f"history[{number}]", "expected a pair of texts, question and answer", shown(pair))
    return tuple(
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    )


# Rows of Alpaca: ``instruction``, with further text in ``input``, earlier turns in ``history``, and ``output``.
ALPACA = RowFormat(
    name="alpaca",
    columns="instruction, with input, output or history",
    required=("instruction",),
    precedence=70,
    prompt="instruction",
    prompt_parts=("input", "history"),
    extend=_extend,
    answer="output",
)
