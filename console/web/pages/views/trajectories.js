// The trajectory browser: groups of the run's record, filtered, a page at a time.

import { get, path, query, Refused } from "../api.js";
import { el, number, replace, shown, table } from "../dom.js";

const FIELDS = ["step_from", "step_to", "reward_min", "reward_max", "status", "prompt"];

export function open(holder, { run, values }) {
  const inputs = {};
  const field = (name, label, attributes = {}) => {
    inputs[name] = el("input", { name, value: values.get(name) || "", ...attributes });
    return el("label", {}, label, inputs[name]);
  };
  inputs.status = el("select", { name: "status" }, [["", "any"], ["trained", "trained"], ["evaluated", "evaluated"], ["dropped", "dropped"], ["in_flight", "in flight"]]
    .map(([value, text]) => el("option", { value, selected: value === (values.get("status") || "") }, text)));
  const each = el("input", { type: "checkbox", name: "each", checked: values.get("each") === "1" });
  const form = el("form", { class: "filters", role: "search", on: { submit: (event) => { event.preventDefault(); search(); } } },
    field("step_from", "step from", { inputmode: "numeric", type: "number", min: "0" }), field("step_to", "step to", { inputmode: "numeric", type: "number", min: "0" }),
    field("reward_min", "reward from", { type: "number", step: "any" }), field("reward_max", "reward to", { type: "number", step: "any" }),
    el("label", {}, "status", inputs.status), field("prompt", "prompt or completion contains", { class: "wide", maxlength: "200" }),
    el("label", { class: "row" }, each, "one by one"), el("button", { type: "submit" }, "Search"));
  const list = el("div");
  const note = el("p", { class: "dim", role: "status" });
  const more = el("button", { type: "button", on: { click: () => load(true) } }, "More");
  more.hidden = true;
  holder.append(el("h1", {}, "Trajectories"), form, list, note, more);
  let items = [];
  let cursor = "";

  function search() {
    const found = new URLSearchParams();
    for (const name of FIELDS) if (inputs[name].value !== "") found.set(name, inputs[name].value);
    if (each.checked) found.set("each", "1");
    const text = found.toString();
    const target = `#/run/${encodeURIComponent(run)}/trajectories${text ? `?${text}` : ""}`;
    if (location.hash === target) load(false);
    else location.hash = target;
  }

  async function load(isMore) {
    more.disabled = true;
    const given = Object.fromEntries(FIELDS.map((name) => [name, inputs[name].value]));
    try {
      const found = await get(path("runs", run, each.checked ? "trajectories" : "groups") + query({ ...given, limit: 40, cursor: isMore ? cursor : "" }));
      items = isMore ? [...items, ...found.items] : found.items;
      cursor = found.next || "";
      more.hidden = !found.next;
      replace(list, each.checked ? trajectoryTable(run, items) : groupTable(run, items));
      note.textContent = shown(`${items.length} shown${found.next ? `; searched down to step ${found.searched_to_step ?? "?"}` : ", all that there are in the record up to the newest checkpoint"}`);
    } catch (error) {
      if (!isMore && !(error instanceof Refused && error.status === 409)) throw error;
      note.textContent = shown(error.message);
    } finally {
      more.disabled = false;
    }
  }

  return { periodMs: 0, refresh: () => load(false) };
}

export function groupLink(run, row, text) {
  const values = query({ id: row.group_id, chapter: row.chapter, at: row.index });
  return el("a", { href: `#/run/${encodeURIComponent(run)}/group${values}` }, text || row.group_id);
}

function groupTable(run, items) {
  return table("Groups", [
    ["group", (row) => groupLink(run, row)],
    ["step", (row) => number(row.step), "num"],
    ["status", (row) => el("span", { class: row.status === "dropped" ? "warn" : "" }, row.status + (row.reason ? `: ${row.reason}` : ""))],
    ["reward", (row) => (row.rewards ? `${number(row.reward_mean)} (${number(row.reward_min, 2)} to ${number(row.reward_max, 2)})` : "–"), "num"],
    ["stale", (row) => number(row.staleness), "num"],
    ["tokens", (row) => number(row.tokens), "num"],
    ["prompt", (row) => row.prompt || "–", "text"],
  ], items, "no group matches");
}

function trajectoryTable(run, items) {
  return table("Trajectories", [
    ["trajectory", (row) => groupLink(run, row, `${row.group_id} #${row.index}`)],
    ["step", (row) => number(row.step), "num"],
    ["reward", (row) => number(row.reward), "num"],
    ["ended", (row) => row.finish_reason + (row.is_baseline ? ", baseline" : "")],
    ["tokens", (row) => number(row.tokens), "num"],
    ["prompt", (row) => row.prompt || "–", "text"],
    ["completion", (row) => row.completion || "–", "text"],
  ], items, "no trajectory matches");
}
