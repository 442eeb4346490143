"""The formats whose columns hold all that is read, each by what its columns mean; `alpaca.py` has one that joins columns."""

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
