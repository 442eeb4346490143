"""The reading routes on a run that lies on a real nats-server and S3 server."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.console.record import recorded_run as recorded
from tests.console.web.conftest import STEPS, Shown
from tests.console.web.shown_run import (
    DROPPED,
    EPISODES,
    EVALUATED,
    GROUP_SIZE,
    GROUPS_A_STEP,
    WAITING,
    WITHOUT_LOGPROBS,
    made_logprobs,
    token_arrays,
)

from penstock.console import connections
from penstock.console.connections import NamedRun
from penstock.console.web import server_routes
from penstock.console.web.access import Access, Role
from penstock.console.web.context import WebContext
from penstock.console.web.reading import stored_groups
from penstock.console.web.reading.open_runs import MAX_OPEN, OpenRuns
from penstock.console.web.reading.recorded_groups import GroupQuery, QueryRefused
from penstock.console.web.reading.run_reading import RunReading
from penstock.console.web.reading.stored_groups import ReadBudget, StoredGroups
from penstock.protocol import blob_keys
from penstock.protocol.errors import RecordBroken
from penstock.protocol.groups import BlobRef
from penstock.protocol.record import run_folder
from penstock.protocol.versions import PolicyVersion

GROUP = "e0.p10.a0"
NO_PACK = BlobRef(key="pack", size_bytes=1, sha256="0" * 64)


def get(shown: Shown, path: str, *, run: str | None = None, **query: Any) -> Any:
    with shown.client() as client:
        answer = client.get(f"/v1/runs/{run or shown.plain.run_id}/{path}", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(shown: Shown, path: str, *, role: Role = Role.READ, method: str = "GET", **query: Any) -> tuple[int, str]:
    with shown.client(role) as client:
        answer = client.request(method, path, params=query or None, json={} if method == "POST" else None)
    return answer.status_code, answer.json()["detail"]


def ids(found: Any) -> list[str]:
    return [item["group_id"] for item in found["items"]]


def test_the_overview_shows_the_figures_of_the_run(shown: Shown) -> None:
    """State, reward, held-out accuracy by source, staleness, and a sentence for what is outside its band."""
    found = get(shown, "summary")
    rewards = [recorded.step(n, 0.0).data["reward_mean"] for n in range(STEPS - 4, STEPS + 1)]
    assert found["reward"] == pytest.approx(sum(rewards) / 5)
    assert (found["step"], found["total_steps"], found["is_live"]) == (STEPS, STEPS + 100, True)
    assert [one["split"] for one in found["evaluations"]] == ["math", "code"]
    assert found["evaluations"][0]["points"][-1]["accuracy"] == pytest.approx(0.5 + 0.4 * 20 / STEPS)
    bands = {band["name"]: band for band in found["bands"]}
    assert bands["kl_behaviour"]["is_healthy"]
    assert not bands["kl_behaviour"]["sentence"]
    assert "max_new_tokens" in bands["truncated_share"]["sentence"]
    assert found["groups"]["dropped"] == {"stale": 3}


def test_metrics_are_sampled_down_and_begin_where_they_are_asked_to(shown: Shown) -> None:
    found = get(shown, "metrics", **{"from": 11, "points": 5, "name": ["reward_mean", "unknown"]})
    assert (found["first"], found["last"], found["bucket"], found["num_steps"]) == (11, STEPS, 5, STEPS - 10)
    values = [recorded.step(n, 0.0).data["reward_mean"] for n in range(11, 16)]
    assert found["figures"]["reward_mean"]["mean"][0] == pytest.approx(sum(values) / 5, rel=1e-5)
    assert list(found["figures"]) == ["reward_mean"]


def test_services_have_the_least_and_the_greatest_value_beside_the_mean(shown: Shown) -> None:
    found = get(shown, "services")
    assert get(shown, "workers").keys() == found.keys()  # its name in earlier releases
    assert [line["id"] for line in found["services"]] == ["rollout-0", "rollout-1", "reward", "trainer"]
    assert found["spread"]["rollout"]["cpu_s"] == {"min": 24.5, "mean": 24.5, "max": 24.5, "num": 2}


def test_versions_show_what_each_worker_took_to_adopt_them_a_page_at_a_time(shown: Shown) -> None:
    first = get(shown, "versions", limit=10)
    second = get(shown, "versions", limit=10, before=first["next"])
    assert [one["version"] for one in first["versions"] + second["versions"]] == list(range(STEPS, STEPS - 20, -1))
    newest = first["versions"][0]
    assert (newest["sent_bytes"], newest["kind"], newest["num_adopted"]) == (10_000 + STEPS, "patch", 2)
    assert (newest["publish_s"], newest["compare_s"], newest["upload_s"]) == (0.05, 0.03, None)
    assert newest["pause_s"] == {"min": 0.02, "mean": pytest.approx(0.03), "max": 0.04, "num": 2}
    assert first["serving"] == {"rollout-0": STEPS, "rollout-1": STEPS}
    assert first["sources"]["rollout-1"] == {"bytes": {"s3": 15_000}, "misses": {"absent": 3}, "peer_misses": {}}


def all_pages(shown: Shown, path: str, **query: Any) -> list[dict[str, Any]]:
    """Return the items of all pages: a busy machine reads less of the record before it answers."""
    items, cursor = [], ""
    while cursor is not None:
        page = get(shown, path, cursor=cursor, **query)
        items, cursor = items + page["items"], page["next"]
    return items


def test_pages_of_groups_hold_every_group_of_the_record_once(shown: Shown) -> None:
    """Trained, evaluated, dropped and in flight, the newest step first."""
    found = all_pages(shown, "groups", limit=7, texts=False)
    trained = [item for item in found if item["status"] == "trained"]
    assert sorted(ids({"items": found})) == sorted([*shown.plain.rewards, DROPPED, EVALUATED, WAITING])
    assert [item["step"] for item in trained] == sorted((item["step"] for item in trained), reverse=True)
    assert all(item["rewards"] == list(shown.plain.rewards[item["group_id"]]) for item in trained)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"step_from": 4, "step_to": 4}, ["e0.p12.a0", "e0.p13.a0", "e0.p14.a0"]),
        ({"status": "in_flight"}, [WAITING]),
        ({"prompt": "SORT: 33 "}, ["e0.p33.a0"]),
        ({"prompt": "completion 2 of e0.p20.a0"}, ["e0.p20.a0"]),
        ({"prompt": "no such text"}, []),
        ({"reward_min": 0.6}, []),
    ],
)
def test_groups_are_found_by_step_status_reward_and_text(
    shown: Shown, query: dict[str, Any], expected: list[str]
) -> None:
    assert ids({"items": all_pages(shown, "groups", limit=100, **query)}) == expected


def test_trajectories_are_listed_one_by_one_with_their_own_reward_and_texts(shown: Shown) -> None:
    found = get(shown, "trajectories", step_from=5, step_to=5, reward_min=1, limit=100)
    assert len(found["items"]) == GROUPS_A_STEP * GROUP_SIZE / 2
    first = found["items"][0]
    assert (first["group_id"], first["index"], first["completion"]) == ("e0.p15.a0", 1, "completion 1 of e0.p15.a0")


def test_a_request_reads_a_bounded_part_and_says_where_the_rest_begins(
    shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search for a text that is nowhere goes on over several requests, and ends."""
    monkeypatch.setattr(stored_groups, "ReadBudget", lambda: ReadBudget(num_objects=5))
    num_requests, cursor, items = 0, "", []
    while cursor is not None:
        page = get(shown, "groups", run=shown.hostile.run_id, prompt="nowhere to be found", cursor=cursor)
        assert page["read_objects"] <= 6
        num_requests, cursor, items = num_requests + 1, page["next"], items + page["items"]
    assert items == []
    assert 6 <= num_requests <= 12


def test_a_cursor_stays_valid_while_the_run_goes_on(shown: Shown) -> None:
    """A new chapter is read by new lists; an old one continues where it was."""
    first = get(shown, "groups", limit=4, texts=False)
    assert first["next"].startswith("3.")
    assert first["searched_to_step"] == STEPS - 1  # where the rest begins: the list has all groups of the last step
    rest = get(shown, "groups", limit=100, texts=False, cursor=first["next"])
    run = shown.plain
    old_end = run.end
    try:
        run.commit(run.write_chapter(4, STEPS + 1, STEPS + 2, old_end, is_last=False), STEPS + 2)
        assert ids(get(shown, "groups", limit=1, texts=False)) == [f"e0.p{(STEPS + 2) * GROUPS_A_STEP}.a0"]
        later = get(shown, "groups", limit=100, texts=False, cursor=first["next"])
        assert ids(later)[:20] == [one for one in ids(rest) if one != WAITING][:20]
    finally:
        run.commit(old_end, STEPS)
    assert ids(get(shown, "groups", limit=4, texts=False)) == ids(first)  # as after a resume from an older checkpoint


def test_a_group_is_shown_with_its_texts_rewards_parts_and_versions(shown: Shown) -> None:
    group, rewards = shown.plain.groups[GROUP], shown.plain.rewards[GROUP]
    found = get(shown, "group", group_id=GROUP)
    assert (found["prompt"], found["step"], found["staleness"]) == (group.prompt_text, 3, 0)
    assert [one["reward"] for one in found["trajectories"]] == list(rewards)
    assert [one["parts"] for one in found["trajectories"]] == [{"correct": reward} for reward in rewards]
    assert [one["completion"] for one in found["trajectories"]] == [t.completion_text for t in group.trajectories]
    assert found["trajectories"][0]["versions"] == [2]


def test_an_episode_is_shown_with_its_conversation_turns_and_rows(shown: Shown) -> None:
    found = get(shown, "group", group_id=EPISODES, chapter=1)["trajectories"][0]
    assert found["messages"][0] == {"role": "user", "content": "look up 37"}
    assert [turn["row"] for turn in found["turns"]] == [0, 0, 1, 2]
    assert len(found["rows"]) == 3
    row = get(shown, "tokens", group_id=EPISODES, trajectory=0, row=1)
    assert row["loss_mask"] == [False] * 6 + [True, True]
    assert row["versions"] == [None] * 6 + [2, 2]


def test_tokens_have_their_log_probability_mask_and_version(shown: Shown) -> None:
    token_ids, logprobs = token_arrays(shown.plain.groups[GROUP], 1)
    query: dict[str, Any] = {"trajectory": 1, "count": 5, "from": 1}
    found = get(shown, "tokens", group_id=GROUP, **query)
    assert (found["ids"], found["first"], found["total"]) == (token_ids[1:6], 1, len(token_ids))
    assert found["logprobs"] == pytest.approx(logprobs[1:6].tolist(), abs=1e-5)
    assert found["loss_mask"] == [False, False, True, True, True]
    assert found["versions"] == [None, None, 2, 2, 2]


def test_tokens_have_the_log_probability_of_the_trainer_and_the_ratio_to_it(shown: Shown) -> None:
    row = shown.plain.groups[GROUP].trajectories[1]
    made = made_logprobs(shown.plain.run_id, 3, [shown.plain.groups[f"e0.p{n}.a0"] for n in (9, 10, 11)], NO_PACK)
    rows = made.group(GROUP, NO_PACK.sha256)
    assert rows is not None
    behaviour, current = row.behaviour_logprobs[row.loss_mask].astype(float), rows[1].logprobs.astype(float)
    found = get(shown, "tokens", group_id=GROUP, trajectory=1)
    sampled = row.loss_mask.tolist().index(True)
    assert (found["current_problem"], found["ratios"][:sampled], found["outcomes"][0]) == ("", [None] * sampled, None)
    assert found["current_logprobs"][sampled:] == pytest.approx(current.tolist(), abs=1e-5)
    assert found["ratios"][sampled:] == pytest.approx(np.exp(current - behaviour).tolist(), rel=1e-4)
    assert found["outcomes"][sampled:][:4] == ["", "", "clipped", ""][: len(current)]
    part = get(shown, "tokens", group_id=GROUP, trajectory=1, count=2, **{"from": sampled})
    assert part["ratios"] == found["ratios"][sampled : sampled + 2]
    ratio = get(shown, "group", group_id=GROUP)["trajectories"][1]["ratio"]
    ratios = np.exp(current - behaviour)
    expected = [ratios.min(), ratios.mean(), ratios.max()]
    assert [ratio["min"], ratio["mean"], ratio["max"]] == pytest.approx(expected, rel=1e-4)
    assert (ratio["num_clipped"], ratio["num_rejected"]) == (len(current) // 3, 0)


@pytest.mark.parametrize(
    ("group_id", "chapter", "why"),
    [
        (DROPPED, 1, "A dropped group is not trained on"),
        (EVALUATED, 1, "An evaluated group is not trained on"),
        (f"e0.p{WITHOUT_LOGPROBS * GROUPS_A_STEP}.a0", 1, "deleted with their packs, or the trainer was killed"),
    ],
)
def test_a_group_without_the_trainers_log_probabilities_says_why(
    shown: Shown, group_id: str, chapter: int, why: str
) -> None:
    found = get(shown, "tokens", group_id=group_id, chapter=chapter)
    assert (found["current_logprobs"], found["ratios"], found["outcomes"]) == (None, None, None)
    assert why in found["current_problem"]
    assert any(found["loss_mask"])
    group = get(shown, "group", group_id=group_id, chapter=chapter)
    assert group["current_problem"] == found["current_problem"]
    assert group["trajectories"][0]["ratio"] is None


def test_steps_that_could_not_be_stored_are_counted_in_the_reason(shown: Shown) -> None:
    group_id = f"e0.p{WITHOUT_LOGPROBS * GROUPS_A_STEP}.a0"
    found = get(shown, "tokens", run=shown.hostile.run_id, group_id=group_id, chapter=1)
    assert "could not store 3 steps of its newest session" in found["current_problem"]


def test_a_dropped_group_and_one_whose_pack_is_gone_are_shown_as_far_as_they_are_known(shown: Shown) -> None:
    dropped = get(shown, "group", group_id=DROPPED, chapter=1)
    assert (dropped["status"], dropped["reason"], dropped["problem"]) == ("dropped", "stale", "")
    assert dropped["meaning"].startswith("older than rollout.max_staleness")
    assert dropped["trajectories"][0]["reward"] is None
    waiting = get(shown, "group", group_id=WAITING)
    assert waiting["problem"] == "no pack of it is recorded (in_flight)"
    run = shown.hostile
    run.blobs.delete([blob_keys.group_pack(run.run_id, PolicyVersion(0), "step30", "a1")])
    fresh = StoredGroups(run.run_id, shown.folder, run.blobs, run.pointer)  # the console's may have the pack in memory
    entry = fresh.find(f"e0.p{30 * GROUPS_A_STEP}.a0", chapter=None)
    group, problem = fresh.group(entry)
    assert group is None
    assert "step30" in problem
    assert entry.rewards == run.rewards[entry.group_id]
    assert ids(fresh.page(GroupQuery(limit=1))) == [entry.group_id]


def test_the_lineage_of_a_version_has_its_groups_and_all_versions_before_it(shown: Shown) -> None:
    found = get(shown, "lineage", version=3)
    assert [member["group_id"] for member in found["groups"]] == ["e0.p9.a0", "e0.p10.a0", "e0.p11.a0"]
    assert [link["version"] for link in found["chain"]] == [3, 2, 1, 0]
    assert found["chapters"] == {"3": 1}


def test_rewards_show_errors_scorers_and_how_the_newest_are_distributed(shown: Shown) -> None:
    found = get(shown, "rewards")
    newest = {"newest": "endpoint answered 500", "newest_at": recorded.START}
    assert found["errors"] == [{"reason": "endpoint_failed", "waited": 1, "dead": 1, **newest}]
    reward = found["distribution"]["reward"]
    assert reward["edges"] == [0.0, 1.0]
    num = STEPS * GROUPS_A_STEP * GROUP_SIZE + 2  # and those of two episodes
    assert (reward["num"], sum(reward["counts"])) == (num, num)
    assert found["service"]["problem"]


def test_a_dead_letter_is_sent_again_by_the_role_run_only(shown: Shown) -> None:
    path = f"/v1/runs/{shown.plain.run_id}/dead-letters"
    letters = get(shown, "dead-letters")["letters"]
    assert [(letter["reason"], letter["group_ids"]) for letter in letters] == [("endpoint_failed", ["e9.p3.a0"])]
    one = get(shown, f"dead-letters/{letters[0]['id']}")
    assert one["cannot_be_sent_again"] is None
    assert one["groups"][0]["prompt"].startswith("sort: ")
    assert refused(shown, f"{path}/1/resend", method="POST")[0] == 403
    with shown.client(Role.RUN) as client:
        assert client.post(f"{path}/1/resend").json()["stage"] == "generated"
    status, text = refused(shown, f"{path}/1/resend", method="POST", role=Role.RUN)
    assert (status, "it was sent again at" in text) == (409, True)


def test_a_run_of_which_only_files_are_left_is_shown_from_them(shown: Shown) -> None:
    """With what its services last reported, and the results of `penstock eval`."""
    found = get(shown, "summary", run="only-files")
    assert (found["newest_version"], get(shown, "rewards", run="only-files")["is_live"]) == (recorded.STEPS, False)
    services = get(shown, "services", run="only-files")["services"]
    assert {one["name"]: (one["alive"], one["has_exited"]) for one in services} == dict.fromkeys(("rollout-0", "rollout-1", "reward", "trainer"), (False, True))  # fmt: skip
    assert get(shown, "versions", run="only-files")["serving"] == {"rollout-0": recorded.STEPS, "rollout-1": 22}
    newest = {
        "step": recorded.STEPS,
        "path": f"only-files@{recorded.STEPS}",
        "eval_results": {"eval": 0.95, "eval/math/accuracy": 0.9},
    }
    assert get(shown, "checkpoints", run="only-files")[-1] == newest
    assert (found["step"], found["is_live"]) == (recorded.STEPS, False)
    assert found["problem"]
    with shown.client() as client:
        listed = {row["run"]: row for row in client.get("/v1/runs").json()}
    assert listed["only-files"]["step"] == recorded.STEPS
    assert len(listed["only-files"]["curve"]) == recorded.STEPS
    assert listed[shown.plain.run_id]["state"] == "running"


def test_settings_that_differ_between_runs_are_listed(shown: Shown) -> None:
    with shown.client() as client:
        runs = [shown.plain.run_id, shown.hostile.run_id]
        found = client.get("/v1/settings-differences", params={"run": runs}).json()
    assert found["differing"] == [{"key": "trainer.lr", "values": ["2e-05", "1e-05"]}]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("nope/summary", 404),
        ("..%2F..%2Fetc/summary", 404),
        ("UPPER/summary", 422),
        ("{run}/metrics?points=100000", 422),
        ("{run}/metrics?from=-1", 422),
        ("{run}/metrics?name=" + "x" * 200, 422),
        ("{run}/groups?limit=100000", 422),
        ("{run}/groups?cursor=7.x", 409),
        ("{run}/groups?prompt=" + "x" * 300, 422),
        ("{run}/groups?reward_min=nan", 422),
        ("{run}/groups?status=secret", 422),
        ("{run}/group?group_id=nothing", 409),
        ("{run}/tokens?group_id=" + GROUP + "&trajectory=99", 409),
        ("{run}/tokens?group_id=" + GROUP + "&row=99", 409),
        ("{run}/tokens?group_id=" + GROUP + "&count=99999999", 422),
        ("{run}/lineage?version=999", 409),
        ("{run}/dead-letters/999", 409),
        ("{run}/dead-letters/0", 422),
        ("only-files/groups", 409),
    ],
)
def test_what_cannot_be_answered_is_refused_with_a_reason_and_never_with_an_error(
    shown: Shown, path: str, status: int
) -> None:
    found, text = refused(shown, f"/v1/runs/{path.format(run=shown.plain.run_id)}")
    assert (found, bool(text)) == (status, True)


def test_a_run_that_nobody_looks_at_is_not_watched_any_more(shown: Shown) -> None:
    now = [0.0]
    for n in range(MAX_OPEN + 1):
        recorded.write_metrics(shown.folder.parent / "many" / f"run{n}")
    runs = OpenRuns([f"run.dir={shown.folder.parent / 'many'}"], {}, idle_s=60.0, monotonic=lambda: now[0])
    try:
        for n in range(MAX_OPEN + 1):
            now[0] += 1
            runs.get(f"run{n}")
        assert runs.names == [f"run{n}" for n in range(1, MAX_OPEN + 1)]
        now[0] += 61
        runs.get("run3")
        give_up = time.monotonic() + 20
        while runs.names != ["run3"]:
            assert time.monotonic() < give_up
            time.sleep(0.02)
    finally:
        runs.close()


def test_the_cache_of_chapters_is_bounded(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_groups, "_CHAPTER_CACHE_BYTES", 1)
    reader = stored_groups.ChapterReader(shown.plain.run_id, shown.plain.blobs.get)
    assert shown.plain.end is not None
    reader.set_end(shown.plain.end, ReadBudget())
    budget = ReadBudget()
    for _ in range(2):
        budget = ReadBudget()
        assert [c.number for n in (3, 2, 1) if (c := reader.chapter(n, budget))] == [3, 2, 1]
    assert budget.read_objects >= 2
    assert reader.chapter(3, ReadBudget(num_objects=0)) is None  # not in the cache, and nothing may be read


def test_a_pack_larger_than_a_page_opens_is_named_and_not_read(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    run = shown.plain
    groups = StoredGroups(run.run_id, shown.folder, run.blobs, run.pointer)
    entry = groups.find(GROUP, chapter=None)
    monkeypatch.setattr(stored_groups, "_PACK_BYTES", 10)
    group, problem = groups.group(entry)
    assert (group, "the page opens at most 10" in problem) == (None, True)
    assert groups.page(GroupQuery(limit=1))["items"][0]["prompt"] is None


def test_the_record_of_another_run_is_refused(shown: Shown) -> None:
    """A pointer that was forged must not show another run's texts under this one's name."""
    groups = StoredGroups("another", shown.folder, shown.plain.blobs, shown.plain.pointer)
    with pytest.raises(RecordBroken, match="has a chapter of run plain"):
        groups.page(GroupQuery(limit=1, texts=False))


def test_groups_of_a_run_whose_servers_do_not_answer_are_refused_at_once_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "done").mkdir(parents=True)
    environ = {"PENSTOCK_S3__ENDPOINT": "http://127.0.0.1:1", "PENSTOCK_NATS__URL": "nats://127.0.0.1:1"}
    reading = RunReading(NamedRun("done", [f"run.dir={tmp_path}"], environ))
    refused = pytest.raises(QueryRefused, match=r"set s3\.endpoint")
    with refused, reading.groups():
        pass


@pytest.mark.parametrize(
    ("addresses", "may_answer"),
    [
        ("https://s3.example.com", True),  # the port of its scheme, which is not tried
        ("nats://127.0.0.1:1", False),
        ("nats://127.0.0.1:1,nats://nats.example.com", True),
        ("nats://127.0.0.1:1,nats://127.0.0.1:2", False),
    ],
)
def test_servers_are_given_up_at_once_only_where_nothing_can_listen(addresses: str, may_answer: bool) -> None:
    """NATS may have several addresses, and S3 one without a port."""
    assert connections.may_answer(addresses) is may_answer


def test_the_token_of_the_reward_service_is_sent_to_the_url_that_was_set_only(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "reward.port").write_text("4711")
    reading = RunReading(NamedRun("r", [f"run.dir={tmp_path}"], {}))

    def service(**environ: str) -> tuple[str, Path | None]:
        web = WebContext(tmp_path, Access(tmp_path / "tokens"), (), environ)
        return server_routes.reward_service(reading, web)

    token = {"PENSTOCK_CONSOLE_REWARD_TOKEN_FILE": "/secret"}
    assert service(**token) == ("http://127.0.0.1:8700", None)  # of a run that does not go on, the port is anybody's
    with run_folder.hold_lock(tmp_path / "r"):
        assert service(**token) == ("http://127.0.0.1:4711", None)
    set_url = service(PENSTOCK_CONSOLE_REWARD_URL="http://rewards:8700", **token)
    assert set_url == ("http://rewards:8700", Path("/secret"))
