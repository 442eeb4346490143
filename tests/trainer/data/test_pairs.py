"""Preference rows in the forms of TRL, HH-RLHF and OpenRLHF give the same two answers; others are refused by column."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.data.row_sets import pair_set, write_rows

from penstock.deploy.data_check.check import check_file
from penstock.deploy.data_check.commands import main
from penstock.protocol.chat_tokenizer import ChatTokenizer
from penstock.protocol.config.reward_settings import RewardSettings
from penstock.trainer.data.dataset import PromptSet
from penstock.trainer.data.pairs import PairSet, pair_row
from penstock.trainer.data.read_rows import rename
from penstock.trainer.errors import MalformedData
from penstock.trainer.settings import DataSettings

QUESTION, GOOD, BAD = "sort 31", "13", "31"
USER = {"role": "user", "content": QUESTION}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


PAIR: dict[str, Any] = {"prompt": QUESTION, "chosen": GOOD, "rejected": BAD}
LABELLED: dict[str, Any] = {"prompt": QUESTION, "completion": GOOD, "label": True}
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "texts": (PAIR, {}),
    "chats": ({"prompt": [USER], "chosen": [answer(GOOD)], "rejected": [answer(BAD)]}, {}),
    "implicit": ({"chosen": [USER, answer(GOOD)], "rejected": [USER, answer(BAD)]}, {}),
    "prompt repeated in the answers": (
        {"prompt": QUESTION, "chosen": [USER, answer(GOOD)], "rejected": [USER, answer(BAD)]},
        {},
    ),
    "hh": (
        {
            "chosen": f"\n\nHuman: {QUESTION}\n\nAssistant: {GOOD}",
            "rejected": f"\n\nHuman: {QUESTION}\n\nAssistant: {BAD}",
        },
        {},
    ),
    "sharegpt": (
        {
            "prompt": None,
            "chosen": [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": GOOD}],
            "rejected": [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": BAD}],
        },
        {},
    ),
    "messages beside a chat": (
        {
            "conversations": [{"from": "human", "value": QUESTION}],
            "chosen": {"from": "gpt", "value": GOOD},
            "rejected": {"from": "gpt", "value": BAD},
        },
        {},
    ),
    "json texts": ({"chosen": json.dumps([USER, answer(GOOD)]), "rejected": json.dumps([USER, answer(BAD)])}, {}),
    "other columns": (
        {"question": QUESTION, "better": GOOD, "worse": BAD, "score": 3},
        {"map": {"prompt": "question", "chosen": "better", "rejected": "worse"}},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_are_read_as_the_same_pair(form: str) -> None:
    row, keys = FORMS[form]
    data = DataSettings.model_validate(keys)
    found = pair_row(rename(row, data, nested_texts=False), data)
    assert found.chosen is not None
    assert found.rejected is not None
    assert found.chosen.chat == (USER, answer(GOOD))
    assert found.rejected.chat == (USER, answer(BAD))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": QUESTION, "chosen": GOOD}, "column rejected: missing"),
        ({**PAIR, "rejected": ""}, "column rejected: missing"),
        ({"chosen": GOOD, "rejected": BAD}, "column chosen: without a column prompt, expected a chat"),
        (
            {"chosen": [USER, answer(GOOD)], "rejected": [{**USER, "content": "x"}, answer(BAD)]},
            "the same chat as in chosen",
        ),
        ({**PAIR, "chosen": [answer(GOOD), USER, answer(GOOD)]}, "one assistant message after it"),
        ({"chosen": [answer(GOOD)], "rejected": [answer(BAD)]}, "expected a prompt and one assistant message"),
        ({**PAIR, "margin": "2"}, "column margin: expected a number"),
        ({**PAIR, "prompt": 5}, "column prompt: expected a text or a list of messages"),
        ({"prompt": QUESTION, "completion": GOOD}, "column label: expected true for a desirable completion, or false"),
        ({**LABELLED, "label": "fine"}, "column label: expected true"),
        ({**LABELLED, "completion": ""}, "column completion: expected an answer"),
        ({**LABELLED, "rejected": BAD}, "column chosen: missing"),
        ({**PAIR, "images": ["a.png"]}, "column images: what is read is text alone"),
        ({**LABELLED, "video": "a.mp4"}, "column video: what is read is text alone"),
        ({**PAIR, "label_smoothing": 0.2}, "set dpo.label_smoothing for all rows"),
    ],
)
def test_other_rows_are_refused(row: dict[str, Any], expected: str) -> None:
    with pytest.raises(MalformedData) as caught:
        pair_row(row, DataSettings())
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("scores", "reason"),
    [
        ({"score_chosen": 1, "score_rejected": 1.0}, "equal scores"),
        ({"chosen_rating": "1.5", "rejected_rating": "2"}, "scores that prefer the rejected answer"),
        ({"margin": -0.5}, "scores that prefer the rejected answer"),
        ({"margin": 0.0, "chosen_score": "good", "rejected_score": "poor"}, None),
        ({"chosen_score": None, "rejected_score": 3.0}, None),
        ({"chosen_score": float("nan"), "rejected_score": 3.0}, None),
        ({"chosen_score": "10", "rejected_score": "9"}, None),
    ],
)
def test_scores_against_the_preference_leave_the_pair_out(scores: dict[str, Any], reason: str | None) -> None:
    assert pair_row({**PAIR, **scores}, DataSettings()).left_out == reason


def test_pairs_are_tokenised_as_for_inference(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    """The prompt as the engine gets it, both answers to their end token; equal answers and long ones are counted."""
    rows = [{**PAIR, "margin": 2}, {"prompt": QUESTION, "chosen": GOOD, "rejected": GOOD}]
    rows.append({"prompt": "sort " + "1" * 40, "chosen": GOOD, "rejected": BAD})
    path = write_rows(tmp_path, *rows)
    data = DataSettings(system_prompt="be brief")
    pairs = PairSet([path], data=data, tokenizer=tokenizer, max_tokens=50)
    assert (len(pairs), dict(pairs.dropped)) == (1, {"identical": 1, "overlong": 1})
    chat = [{"role": "system", "content": "be brief"}, USER]
    assert pairs[0].prompt.tolist() == tokenizer.encode(tokenizer.render(chat, add_generation_prompt=True))
    assert pairs[0].chosen.tolist() == [*tokenizer.encode(GOOD), tokenizer.eos_ids[0]]
    assert pairs[0].rejected.tolist() == [*tokenizer.encode(BAD), tokenizer.eos_ids[0]]
    assert pairs[0].margin == 2.0
    whole = PairSet([path], data=data, tokenizer=tokenizer, max_tokens=50, ends="chat")
    rendered = tokenizer.render([*chat, answer(GOOD)], add_generation_prompt=False)
    assert [*whole[0].prompt, *whole[0].chosen] == tokenizer.encode(rendered)


def test_a_row_of_one_answer_is_read_where_the_loss_takes_it(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    """Its label tells which answer of a pair it is; the other has no tokens. Elsewhere it is refused."""
    rows: list[dict[str, Any]] = [
        LABELLED,
        {"prompt": [USER], "completion": [answer(BAD)], "label": False},
        {"completion": [USER, answer(BAD)], "label": 0},
        PAIR,
    ]
    path = write_rows(tmp_path, *rows)
    pairs = pair_set(path, tokenizer)
    good, bad = ([*tokenizer.encode(text), tokenizer.eos_ids[0]] for text in (GOOD, BAD))
    assert [(pair.chosen.tolist(), pair.rejected.tolist()) for pair in (pairs[n] for n in range(4))] == [
        (good, []),
        ([], bad),
        ([], bad),
        (good, bad),
    ]
    assert len({tuple(pairs[n].prompt.tolist()) for n in range(4)}) == 1
    with pytest.raises(
        MalformedData, match=r'one answer with a label.* dpo.loss = "kto" alone, .* \(and 2 more rows\)'
    ):
        pair_set(path, tokenizer, takes_one_answer=False)


def test_rows_for_a_reward_are_taken_from_the_prompts(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [PAIR if number % 2 == 0 else {"prompt": f"p{number}"} for number in range(8)]
    write_rows(tmp_path, *rows)
    (tmp_path / "run.toml").write_text(
        f'run.id = "r"\nmodel.path = "{model}"\ndata.train = "{tmp_path / "rows.jsonl"}"\n'
        "algorithm.dpo_coefficient = 1.0\n"
    )
    assert main(["data-rows", "--run-file", str(tmp_path / "run.toml"), "--number", "2"]) == 0
    printed = [json.loads(line)["prompt"] for line in capsys.readouterr().out.splitlines()]
    assert printed == ["p1", "p5"]


def test_one_file_holds_prompts_and_pairs(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    """Each set skips the rows of the other; a group's answers are compared by the reward for self-play."""
    rows: list[dict[str, Any]] = [
        {"prompt": QUESTION, "ground_truth": GOOD},
        {**PAIR, "data_source": "pairs"},
        {"prompt": [USER], "self_play": True},
        {"chosen": [USER, answer(GOOD)], "rejected": [USER, answer(BAD)]},
    ]
    file = tmp_path / "rows.jsonl"

    def prompts(data: DataSettings) -> PromptSet:
        write_rows(tmp_path, *rows)
        reward = RewardSettings(name="r")
        return PromptSet([file], data=data, reward=reward, tokenizer=tokenizer, skips_pairs=True)

    def pairs() -> PairSet:
        return PairSet([file], data=DataSettings(), tokenizer=tokenizer, max_tokens=50, skips_prompts=True)

    with pytest.raises(MalformedData, match=r":3: column self_play: .* set data.self_play_reward to a reward"):
        prompts(DataSettings())
    found = prompts(DataSettings(self_play_reward="judge"))
    assert dict(found.rows_by_reward) == {"r": 1, "judge": 1}
    assert [found[number].reward.name for number in range(2)] == ["r", "judge"]
    assert [one for one in found.notes[0].describe() if one.startswith("2 further rows are pairs")]
    good, bad = ([*tokenizer.encode(text), tokenizer.eos_ids[0]] for text in (GOOD, BAD))
    both = pairs()
    assert [(both[n].chosen.tolist(), both[n].rejected.tolist()) for n in range(len(both))] == [(good, bad)] * 2
    report = check_file(file, DataSettings(self_play_reward="judge"), tokenizer, has_pairs=True)
    assert report.to_document()["can_train"] == {"grpo": 2, "sft": 0, "pairs": 2}
    rows[1] = {"prompt": QUESTION, "chosen": GOOD}
    with pytest.raises(MalformedData, match=r":2: column rejected: missing beside chosen; a pair has both"):
        prompts(DataSettings(self_play_reward="judge"))
    with pytest.raises(MalformedData, match=r":2: column rejected: missing beside chosen"):
        pairs()
    rows[:] = [PAIR]
    with pytest.raises(MalformedData, match=r"every row is a pair of answers, and none a prompt"):
        prompts(DataSettings())
    rows[:] = [{"prompt": QUESTION}]
    prompts(DataSettings())
    with pytest.raises(
        MalformedData, match=r"no row has chosen and rejected, which algorithm.dpo_coefficient trains on"
    ):
        pairs()
