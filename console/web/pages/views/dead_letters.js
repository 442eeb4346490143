// Messages that could not be processed, why, and sending them again.

import { get, path, post, query } from "../api.js";
import { el, number, pairs, panel, replace, shown, table } from "../dom.js";

export function open(holder, { run }) {
  const list = el("div");
  const note = el("p", { role: "status" });
  const one = el("div");
  const older = el("button", { type: "button", on: { click: () => load(true) } }, "Older letters");
  older.hidden = true;
  holder.append(el("h1", {}, "Dead letters"), note, list, older, one);
  let letters = [];
  let cursor = null;

  async function load(isOlder) {
    const found = await get(path("runs", run, "dead-letters") + query({ before: isOlder ? cursor : "", limit: 50 }));
    letters = isOlder ? [...letters, ...found.letters] : found.letters;
    cursor = found.next;
    older.hidden = cursor === null;
    const unreadable = Object.keys(found.unreadable).length;
    replace(list, table("Dead letters", [
      ["id", (row) => el("button", { type: "button", on: { click: () => show(row.id) } }, String(row.id)), "num"],
      ["when", (row) => new Date(row.at).toLocaleString()], ["stage", (row) => row.stage], ["reason", (row) => row.reason], ["detail", (row) => row.detail, "text"],
      ["groups", (row) => row.group_ids.slice(0, 3).join(", ") + (row.num_groups > 3 ? ` and ${row.num_groups - 3} more` : ""), "text"],
      ["attempts", (row) => number(row.num_delivered), "num"], ["sent again", (row) => row.sent_at || "–"],
    ], letters, "no dead letters"), unreadable ? el("p", { class: "warn" }, `${unreadable} letters cannot be read by this build`) : null);
  }

  async function show(id) {
    try {
      const found = await get(path("runs", run, "dead-letters", id));
      const button = el("button", { type: "button", on: { click: () => resend(id) } }, "Send it again");
      button.disabled = found.cannot_be_sent_again !== null;
      replace(one, panel(`Dead letter ${id}`, pairs([
        ["stage", found.stage], ["reason", found.reason], ["detail", found.detail], ["groups", found.group_ids.join(", ") || "–"], ["attempts", number(found.num_delivered)],
      ]), found.problem ? el("p", { class: "warn" }, found.problem) : null, found.notes.map((text) => el("p", { class: "warn" }, text)),
      el("p", {}, button, " ", found.cannot_be_sent_again ? `cannot be sent again: ${found.cannot_be_sent_again}` : ""),
      found.groups.map((group) => el("div", {}, Object.entries(group).map(([name, value]) => el("div", {}, el("strong", {}, name),
        (Array.isArray(value) ? value : [value]).map((text) => el("pre", { class: "text" }, typeof text === "string" ? text : JSON.stringify(text)))))))));
    } catch (error) {
      note.textContent = shown(error.message);
    }
  }

  async function resend(id) {
    try {
      const found = await post(path("runs", run, "dead-letters", id, "resend"));
      note.textContent = shown(`${id}: sent again to ${found.stage}: ${found.group_ids.join(", ")}`);
      replace(one);
      await load(false);
    } catch (error) {
      note.textContent = shown(error.message);
    }
  }

  return { periodMs: 0, refresh: () => load(false) };
}
