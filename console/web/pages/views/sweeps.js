// The sweeps among the runs: the settings that vary against a figure, and the runs in order of it, the best first.

import { get, path } from "../api.js";
import { scatter, sparkline } from "../charts.js";
import { el, number, panel, replaceIfChanged, table } from "../dom.js";
import { said, t } from "../language.js";
import { COMPARED, KINDS } from "./runs.js";

// In the order in which `penstock sweep` chooses.
const FIGURES = ["accuracy", "eval_reward", "reward", "eval_loss", "loss"];
const isLoss = (figure) => figure.endsWith("loss");

export function open(holder) {
  const list = el("div");
  const chosen = el("select", { name: "figure", on: { change: () => draw() } }, ["", ...FIGURES].map((name) => el("option", { value: name }, t(`sweep.${name || "auto"}`))));
  holder.append(el("h1", {}, t("sweep.title")), el("form", { class: "filters", on: { submit: (event) => event.preventDefault() } }, el("label", {}, t("sweep.figure"), chosen)), list);
  let sweeps = [];

  function draw() {
    replaceIfChanged(list, [sweeps, chosen.value], () => (sweeps.length ? sweeps.map((one) => drawn(one, chosen.value)) : el("p", { class: "dim" }, t("sweep.none"))));
  }

  return {
    periodMs: 10000,
    async refresh() {
      sweeps = grouped(await get(path("runs")));
      draw();
    },
  };
}

// `penstock sweep` stores nothing but its runs: those whose names begin alike, and go on with the same settings.
function grouped(runs) {
  const groups = new Map();
  for (const row of runs) {
    const word = (key) => `-${key.split(".").at(-1).replaceAll("_", "-")}-`;
    const words = [...new Set(Object.keys(row.varied).map(word))].sort((a, b) => row.run.indexOf(a) - row.run.indexOf(b));
    if (!words.length) continue;
    const name = row.run.slice(0, row.run.indexOf(words[0]));
    const group = groups.get([name, ...words].join()) || { name, words, word, runs: [] };
    group.runs.push(row);
    groups.set([name, ...words].join(), group);
  }
  // Where a word may mean two settings, it is the one that all of the runs have.
  return [...groups.values()].filter(({ runs: own }) => own.length > 1).map(({ name, words, word, runs: own }) => {
    const keys = words.map((one) => Object.keys(own[0].varied).find((key) => word(key) === one && own.every((row) => key in row.varied))).filter(Boolean);
    return { name, keys, runs: own.map((row) => ({ ...row, values: keys.map((key) => row.varied[key]) })) };
  });
}

function drawn({ name, keys, runs }, wanted) {
  const has = (row, figure) => row[figure] !== null && row[figure] !== undefined;
  const figure = wanted || FIGURES.find((one) => runs.some((row) => has(row, one))) || "reward";
  const place = (row) => (has(row, figure) ? (isLoss(figure) ? row[figure] : -row[figure]) : Infinity);
  const ordered = [...runs].sort((a, b) => (place(a) < place(b) ? -1 : place(a) > place(b) ? 1 : 0));
  const best = ordered.length && has(ordered[0], figure) ? ordered[0].run : null;
  const label = t(`sweep.${figure}`);
  const shown = (value) => (typeof value === "number" ? String(value) : String(value ?? "–"));
  return panel(t("sweep.of", { name, n: runs.length }),
    el("p", {}, el("a", { href: `#/compare?${ordered.slice(0, COMPARED).map((row) => `run=${encodeURIComponent(row.run)}`).join("&")}` }, t("sweep.compare"))),
    el("div", { class: "grid" }, keys.map((key, at) => scatter(t("sweep.against", { figure: label, key }),
      runs.filter((row) => has(row, figure)).map((row) => ({ x: row.values[at], y: row[figure], name: row.run, isBest: row.run === best }))))),
    table(t("sweep.of", { name, n: runs.length }), [
      [t("col.run"), (row) => el("a", { href: `#/run/${encodeURIComponent(row.run)}/overview` }, row.run)],
      ...keys.map((key, at) => [key, (row) => shown(row.values[at]), "num"]),
      [label, (row) => [number(row[figure]), row.run === best ? el("b", { class: "good" }, ` ${t("sweep.best")}`) : null], "num"],
      [t("col.state"), (row) => el("span", { class: KINDS[row.state] || "" }, said(row.state))],
      [t("col.step"), (row) => number(row.step), "num"], [t("col.curve"), (row) => sparkline(row.curve)],
    ], ordered));
}
