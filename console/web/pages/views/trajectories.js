// The trajectory browser: groups of the run's record, filtered, a page at a time.

import { get, path, query, Refused } from "../api.js";
import { el, number, replace, shown, table } from "../dom.js";
import { said, t } from "../language.js";

const FIELDS = ["step_from", "step_to", "version", "reward_min", "reward_max", "prompt"];
const STATES = ["", "trained", "evaluated", "dropped", "in_flight"];

export function open(holder, { run, values }) {
  const inputs = {};
  const field = (name, label, attributes = {}) => {
    inputs[name] = el("input", { name, value: values.get(name) || "", ...attributes });
    return el("label", {}, label, inputs[name]);
  };
  const reasons = new Set([values.get("reason")].filter(Boolean)); // why groups of this run were dropped
  const chosen = () => inputs.status.value.split(": ", 2);
  const fillStates = (selected) => replace(inputs.status, [...STATES, ...[...reasons].map((reason) => `dropped: ${reason}`)]
    .map((value) => el("option", { value, selected: value === selected }, value ? value.split(": ").map(said).join(": ") : t("traj.any"))));
  inputs.status = el("select", { name: "status" });
  fillStates(["status", "reason"].map((name) => values.get(name) ?? (name === "status" ? "trained" : "")).filter(Boolean).join(": "));
  const each = el("input", { type: "checkbox", name: "each", checked: values.get("each") === "1" });
  const form = el("form", { class: "filters", role: "search", on: { submit: (event) => { event.preventDefault(); search(); } } },
    field("step_from", t("traj.step-from"), { inputmode: "numeric", type: "number", min: "0" }), field("step_to", t("traj.step-to"), { inputmode: "numeric", type: "number", min: "0" }), field("version", t("traj.version"), { inputmode: "numeric", type: "number", min: "0" }),
    field("reward_min", t("traj.reward-from"), { type: "number", step: "any" }), field("reward_max", t("traj.reward-to"), { type: "number", step: "any" }),
    el("label", {}, t("col.status"), inputs.status), field("prompt", t("traj.contains"), { class: "wide", maxlength: "200" }),
    el("label", { class: "row" }, each, t("traj.one-by-one")), el("button", { type: "submit" }, t("search")));
  const list = el("div");
  const note = el("p", { class: "dim", role: "status" });
  const more = el("button", { type: "button", on: { click: () => load(true) } }, t("traj.more"));
  more.hidden = true;
  holder.append(el("h1", {}, t("nav.trajectories")), form, list, note, more);
  let items = [];
  let cursor = "";

  const given = () => ({ ...Object.fromEntries(FIELDS.map((name) => [name, inputs[name].value])), status: chosen()[0], reason: chosen()[1] });

  function search() {
    const found = new URLSearchParams();
    for (const [name, value] of Object.entries(given())) if (value || name === "status") found.set(name, value);
    if (each.checked) found.set("each", "1");
    const text = found.toString();
    const target = `#/run/${encodeURIComponent(run)}/trajectories${text ? `?${text}` : ""}`;
    if (location.hash === target) load(false);
    else location.hash = target;
  }

  async function load(isMore) {
    more.disabled = true;
    try {
      const found = await get(path("runs", run, each.checked ? "trajectories" : "groups") + query({ ...given(), limit: 100, cursor: isMore ? cursor : "" }));
      items = isMore ? [...items, ...found.items] : found.items;
      cursor = found.next || "";
      more.hidden = !found.next;
      const meanings = new Map(items.filter((row) => row.reason).map((row) => [row.reason, row.meaning]));
      replace(list, [...meanings].map(([reason, meaning]) => el("p", { class: "dim" }, `${said(reason)}: ${said(meaning)}`)), each.checked ? trajectoryTable(run, items) : groupTable(run, items));
      note.textContent = shown(found.next ? t(found.searched_to_step === null ? "traj.shown" : "traj.shown-down-to", { n: items.length, step: found.searched_to_step }) : t("traj.shown-all", { n: items.length }));
    } catch (error) {
      if (!isMore && !(error instanceof Refused && error.status === 409)) throw error;
      note.textContent = shown(error.message);
    } finally {
      more.disabled = false;
    }
  }

  return {
    periodMs: 0,
    async refresh() {
      const [found] = await Promise.all([get(path("runs", run, "summary")), load(false)]);
      for (const [reason, count] of Object.entries(found.groups.dropped)) if (count) reasons.add(reason);
      fillStates(inputs.status.value);
    },
  };
}

export function groupLink(run, row, text) {
  const values = query({ id: row.group_id, chapter: row.chapter, at: row.index });
  return el("a", { href: `#/run/${encodeURIComponent(run)}/group${values}` }, text || row.group_id);
}

// A text of a list, without the marks of its chat template; the group has them.
const plain = (text) => (text || "–").replace(/<\|[\w-]+\|>/g, " ");

function groupTable(run, items) {
  return table(t("traj.groups"), [
    [t("col.group"), (row) => groupLink(run, row)],
    [t("col.step"), (row) => number(row.step), "num", (row) => row.step],
    [t("col.status"), (row) => el("span", { class: row.status === "dropped" ? "warn" : "" }, said(row.status) + (row.reason ? `: ${said(row.reason)}` : ""))],
    [t("col.reward"), (row) => (row.rewards ? t("traj.reward", { mean: number(row.reward_mean), low: number(row.reward_min, 2), high: number(row.reward_max, 2) }) : "–"), "num", (row) => row.reward_mean],
    [t("col.staleness"), (row) => number(row.staleness), "num", (row) => row.staleness],
    [t("col.tokens"), (row) => number(row.tokens), "num", (row) => row.tokens],
    [t("col.prompt"), (row) => plain(row.prompt), "text"],
  ], items, t("traj.no-group"));
}

function trajectoryTable(run, items) {
  return table(t("nav.trajectories"), [
    [t("col.trajectory"), (row) => groupLink(run, row, `${row.group_id} #${row.index}`)],
    [t("col.step"), (row) => number(row.step), "num", (row) => row.step],
    [t("col.reward"), (row) => number(row.reward), "num", (row) => row.reward],
    [t("col.ended"), (row) => said(row.finish_reason) + (row.is_baseline ? t("traj.baseline") : "")],
    [t("col.tokens"), (row) => number(row.tokens), "num", (row) => row.tokens],
    [t("col.prompt"), (row) => plain(row.prompt), "text"],
    [t("col.completion"), (row) => plain(row.completion), "text"],
  ], items, t("traj.none"));
}
