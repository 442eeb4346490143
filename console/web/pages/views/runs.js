// All runs: state, curve, age, tags; two to twenty of them can be compared.

import { get, path } from "../api.js";
import { sparkline } from "../charts.js";
import { age, el, number, replaceIfChanged, table } from "../dom.js";
import { said, t } from "../language.js";

// Of a training on given answers, which has no rewards.
const loss = (value) => (value !== null && value !== undefined ? t("runs.loss", { n: number(value, 3) }) : "–");

export const KINDS = { running: "good", failed: "bad", stopped: "warn", paused: "warn" };

export const COMPARED = 20;

export function open(holder) {
  const chosen = new Set();
  const list = el("div");
  const button = el("button", { type: "button", on: { click: () => {
    location.hash = `#/compare?${[...chosen].map((run) => `run=${encodeURIComponent(run)}`).join("&")}`;
  } } }, t("runs.compare"));
  button.disabled = true;
  const filter = el("input", { name: "filter", placeholder: t("runs.filter-words"), "aria-label": t("runs.filter"), on: { input: () => draw() } });
  holder.append(el("h1", {}, t("nav.runs")), el("div", { class: "bar" }, el("a", { href: "#/new" }, t("new.title")), el("a", { href: "#/sweeps" }, t("sweep.title")), filter, button, el("span", { class: "dim" }, t("runs.two"))), list);
  let runs = [];

  const toggle = (run) => (event) => {
    if (event.target.checked) chosen.add(run);
    else chosen.delete(run);
    button.disabled = chosen.size < 2 || chosen.size > COMPARED;
  };

  function draw() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = runs.filter((row) => words.every((word) => [row.run, row.state, said(row.state), ...row.tags].some((text) => text.toLowerCase().includes(word))));
    replaceIfChanged(list, [shown, Math.floor(Date.now() / 60000)], () => table(t("nav.runs"), [
        [t("col.compare"), (row) => el("input", { type: "checkbox", "aria-label": t("runs.compare-one", { run: row.run }), checked: chosen.has(row.run), on: { change: toggle(row.run) } })],
        [t("col.run"), (row) => el("a", { href: `#/run/${encodeURIComponent(row.run)}/overview` }, row.run), "", (row) => row.run],
        [t("col.state"), (row) => el("span", { class: KINDS[row.state] || "" }, said(row.state)), "", (row) => row.state],
        [t("col.step"), (row) => number(row.step), "num", (row) => row.step],
        [t("col.held-out"), (row) => (row.accuracy !== null && row.accuracy !== undefined ? number(row.accuracy) : row.eval_reward !== null && row.eval_reward !== undefined ? t("group.reward", { n: number(row.eval_reward, 2) }) : loss(row.eval_loss)), "num", (row) => row.accuracy ?? row.eval_reward ?? row.eval_loss],
        [t("col.reward"), (row) => (row.reward === null || row.reward === undefined ? loss(row.loss) : number(row.reward, 2)), "num", (row) => row.reward ?? row.loss],
        [t("col.curve"), (row) => sparkline(row.curve)],
        [t("col.changed"), (row) => age(row.when), "", (row) => row.when],
        [t("col.tags"), (row) => row.tags.join(", ")],
    ], shown, runs.length ? t("runs.no-match") : t("runs.none")));
  }

  return {
    periodMs: 5000,
    async refresh() {
      runs = await get(path("runs"));
      draw();
    },
  };
}
