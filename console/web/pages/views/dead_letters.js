// Messages that could not be processed, why, and sending them again.

import { get, path, post, query, Refused } from "../api.js";
import { clock, el, number, pairs, panel, replace, shown, table } from "../dom.js";
import { said, t } from "../language.js";

export function open(holder, { run }) {
  const list = el("div");
  const note = el("p", { role: "status" });
  const one = el("div");
  const older = el("button", { type: "button", on: { click: () => load(true) } }, t("dead.older"));
  older.hidden = true;
  holder.append(el("h1", {}, t("nav.dead-letters")), note, list, older, one);
  let letters = [];
  let cursor = null;

  async function load(isOlder) {
    let found;
    try {
      found = await get(path("runs", run, "dead-letters") + query({ before: isOlder ? cursor : "", limit: 50 }));
    } catch (error) {
      if (!(error instanceof Refused) || error.status === 401) throw error;
      note.textContent = shown(error.message); // its NATS has stopped
      return;
    }
    letters = isOlder ? [...letters, ...found.letters] : found.letters;
    cursor = found.next;
    older.hidden = cursor === null;
    const unreadable = Object.keys(found.unreadable).length;
    replace(list, table(t("nav.dead-letters"), [
      [t("col.id"), (row) => el("button", { type: "button", on: { click: () => show(row.id) } }, String(row.id)), "num"],
      [t("col.when"), (row) => clock(Date.parse(row.at) / 1000)], [t("col.stage"), (row) => said(row.stage)], [t("col.reason"), (row) => said(row.reason)], [t("col.detail"), (row) => row.detail, "text"],
      [t("col.groups"), (row) => row.group_ids.slice(0, 3).join(", ") + (row.num_groups > 3 ? t("dead.more", { n: row.num_groups - 3 }) : ""), "text"],
      [t("col.attempts"), (row) => number(row.num_delivered), "num"], [t("col.sent-again"), (row) => row.sent_at || "–"],
    ], letters, t("dead.none")), unreadable ? el("p", { class: "warn" }, t("dead.unreadable", { n: unreadable })) : null);
  }

  async function show(id) {
    try {
      const found = await get(path("runs", run, "dead-letters", id));
      const button = el("button", { type: "button", on: { click: () => resend(id) } }, t("dead.resend"));
      button.disabled = found.cannot_be_sent_again !== null;
      replace(one, panel(t("dead.one", { id }), pairs([
        [t("col.stage"), said(found.stage)], [t("col.reason"), said(found.reason)], [t("col.detail"), found.detail], [t("col.groups"), found.group_ids.join(", ") || "–"], [t("col.attempts"), number(found.num_delivered)],
      ]), found.problem ? el("p", { class: "warn" }, found.problem) : null, found.notes.map((text) => el("p", { class: "warn" }, text)),
      el("p", {}, button, " ", found.cannot_be_sent_again ? t("dead.cannot", { why: said(found.cannot_be_sent_again) }) : ""),
      found.groups.map((group) => el("div", {}, Object.entries(group).map(([name, value]) => el("div", {}, el("strong", {}, name),
        (Array.isArray(value) ? value : [value]).map((text) => el("pre", { class: "text" }, typeof text === "string" ? text : JSON.stringify(text)))))))));
    } catch (error) {
      note.textContent = shown(error.message);
    }
  }

  async function resend(id) {
    try {
      const found = await post(path("runs", run, "dead-letters", id, "resend"));
      note.textContent = shown(t("dead.resent", { id, stage: said(found.stage), groups: found.group_ids.join(", ") }));
      replace(one);
      await load(false);
    } catch (error) {
      note.textContent = shown(error.message);
    }
  }

  return { periodMs: 0, refresh: () => load(false) };
}
