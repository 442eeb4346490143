// All runs: state, curve, age, tags; two to twenty of them can be compared.

import { get, path } from "../api.js";
import { sparkline } from "../charts.js";
import { age, el, number, replaceIfChanged, table } from "../dom.js";

// Of a training on given answers, which has no rewards.
const loss = (value) => (value !== null && value !== undefined ? `loss ${number(value, 3)}` : "–");

const KINDS = { running: "good", failed: "bad", stopped: "warn", paused: "warn" };

const MOST = 20;

export function open(holder) {
  const chosen = new Set();
  const list = el("div");
  const button = el("button", { type: "button", on: { click: () => {
    location.hash = `#/compare?${[...chosen].map((run) => `run=${encodeURIComponent(run)}`).join("&")}`;
  } } }, "Compare");
  button.disabled = true;
  const filter = el("input", { name: "filter", placeholder: "name, state or tag", "aria-label": "filter", on: { input: () => draw() } });
  holder.append(el("h1", {}, "Runs"), el("div", { class: "bar" }, el("a", { href: "#/new" }, "New run"), filter, button, el("span", { class: "dim" }, "two to twenty runs")), list);
  let runs = [];

  const toggle = (run) => (event) => {
    if (event.target.checked) chosen.add(run);
    else chosen.delete(run);
    button.disabled = chosen.size < 2 || chosen.size > MOST;
  };

  function draw() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = runs.filter((row) => words.every((word) => [row.run, row.state, ...row.tags].some((text) => text.toLowerCase().includes(word))));
    replaceIfChanged(list, [shown, Math.floor(Date.now() / 60000)], () => table("Runs", [
        ["", (row) => el("input", { type: "checkbox", "aria-label": `compare ${row.run}`, checked: chosen.has(row.run), on: { change: toggle(row.run) } })],
        ["run", (row) => el("a", { href: `#/run/${encodeURIComponent(row.run)}/overview` }, row.run)],
        ["state", (row) => el("span", { class: KINDS[row.state] || "" }, row.state)],
        ["step", (row) => number(row.step), "num"],
        ["held-out", (row) => (row.accuracy !== null && row.accuracy !== undefined ? number(row.accuracy) : row.eval_reward !== null && row.eval_reward !== undefined ? `reward ${number(row.eval_reward, 2)}` : loss(row.eval_loss)), "num"],
        ["reward", (row) => (row.reward === null || row.reward === undefined ? loss(row.loss) : number(row.reward, 2)), "num"],
        ["curve", (row) => sparkline(row.curve)],
        ["changed", (row) => age(row.when)],
        ["tags", (row) => row.tags.join(", ")],
    ], shown, runs.length ? "no run has these words" : "no runs yet; start one with: penstock quickstart"));
  }

  return {
    periodMs: 5000,
    async refresh() {
      runs = await get(path("runs"));
      draw();
    },
  };
}
