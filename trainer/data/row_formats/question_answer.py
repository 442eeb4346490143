"""A question and its answer, which is the ground truth."""

from penstock.trainer.row_format import RowFormat

QUESTION_ANSWER = RowFormat(
    name="question_answer",
    columns="question, answer; the answer is the ground truth",
    required=("question", "answer"),
    precedence=50,
    prompt="question",
    ground_truth="answer",
)
