// Two to four runs: their curves over one another, and the settings in which they differ.

import { get, path, query } from "../api.js";
import { LineChart } from "../charts.js";
import { el, panel, replaceIfChanged, table } from "../dom.js";

const FIGURES = [
  ["reward_mean", "Reward"], ["loss", "Loss"], ["kl_behaviour", "KL between sampler and policy"], ["entropy", "Entropy"],
  ["staleness_mean", "Staleness"], ["step_s", "Seconds of a step"], ["tokens_trained", "Tokens trained a step"], ["truncated_share", "Truncated completions"],
];

export function open(holder, { values }) {
  const runs = values.getAll("run").slice(0, 4);
  const grid = el("div", { class: "grid" });
  const settings = el("div");
  const charts = new Map();
  holder.append(el("h1", {}, `Compare ${runs.join(", ")}`), grid, panel("Settings that differ", settings));
  return {
    periodMs: 5000,
    async refresh() {
      const names = FIGURES.map(([name]) => name);
      const [found, summaries, differences] = await Promise.all([
        Promise.all(runs.map((run) => get(path("runs", run, "metrics") + query({ points: 400, name: names })))),
        Promise.all(runs.map((run) => get(path("runs", run, "summary")))),
        get(path("settings-differences") + query({ run: runs })).catch((error) => ({ problem: error.message })),
      ]);
      const chart = (title, lines) => {
        if (!lines.length) return;
        if (!charts.has(title)) {
          charts.set(title, new LineChart(title));
          grid.append(charts.get(title).element);
        }
        charts.get(title).set(lines);
      };
      for (const [name, title] of FIGURES) {
        chart(title, runs.flatMap((run, at) => (found[at].figures[name] ? [{ label: run, steps: found[at].steps, ...found[at].figures[name] }] : [])));
      }
      chart("Held-out", runs.flatMap((run, at) => summaries[at].evaluations.slice(0, 1).map((one) => {
        const mean = one.points.map((point) => point[one.measure]);
        return { label: run, steps: one.points.map((point) => point.step), mean, min: mean, max: mean };
      })));
      replaceIfChanged(settings, differences, () => (differences.problem ? el("p", { class: "warn" }, differences.problem)
        : [table("Settings that differ", [["setting", (row) => row.key], ...differences.runs.map((run, at) => [run, (row) => row.values[at], "text"])], differences.differing),
          el("p", { class: "dim" }, `${differences.num_equal} settings are equal`)]));
    },
    close() {
      for (const one of charts.values()) one.destroy();
    },
  };
}
