// Two to twenty runs: their curves over one another, and the settings in which they differ.

import { get, path, query } from "../api.js";
import { axes, LineChart, picked, toolbar } from "../charts.js";
import { el, panel, replaceIfChanged, table } from "../dom.js";
import { t } from "../language.js";

const FIGURES = [
  ["reward_mean", "chart.reward"], ["loss", "chart.loss"], ["policy_loss", "chart.policy-loss"], ["kl_divergence", "chart.kl-divergence"], ["kl_reference", "chart.kl-reference"], ["eval_loss", "chart.eval-loss"],
  ["kl_behaviour", "chart.kl-behaviour"], ["entropy", "chart.entropy"], ["staleness_mean", "chart.staleness-of-step"], ["step_s", "chart.seconds"],
  ["tokens_trained", "chart.tokens-of-step"], ["truncated_share", "chart.truncated"],
].map(([name, title]) => [name, t(title)]);

export function open(holder, { values }) {
  const runs = values.getAll("run").slice(0, 20);
  const tools = toolbar("compare", () => view.refresh());
  const grid = el("div", { class: "grid" });
  const settings = el("div");
  const charts = new Map();
  holder.append(el("h1", {}, t("compare.title", { runs: runs.join(", ") })), tools.element, grid, panel(t("compare.settings"), settings));
  const view = {
    periodMs: 5000,
    async refresh() {
      const figures = [...FIGURES, ...picked("compare").map((name) => [name, name])];
      const names = [...figures.map(([name]) => name), "tokens_trained"];
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
      tools.names([...new Set(found.flatMap((one) => one.names))].sort());
      for (const [name, title] of figures) {
        chart(title, runs.flatMap((run, at) => (found[at].figures[name] ? [{ label: run, ...axes(found[at]), ...found[at].figures[name] }] : [])));
      }
      chart(t("chart.held-out"), runs.flatMap((run, at) => summaries[at].evaluations.slice(0, 1).map((one) => {
        const mean = one.points.map((point) => point[one.measure]);
        return { label: run, steps: one.points.map((point) => point.step), mean, min: mean, max: mean };
      })));
      replaceIfChanged(settings, differences, () => (differences.problem ? el("p", { class: "warn" }, differences.problem)
        : [table(t("compare.settings"), [[t("col.setting"), (row) => row.key], ...differences.runs.map((run, at) => [run, (row) => row.values[at], "text"])], differences.differing.filter((row) => !/^(nats|s3)\.|^run\.id$/.test(row.key))),
          el("p", { class: "dim" }, t("compare.equal", { n: differences.num_equal }))]));
    },
    close() {
      for (const one of charts.values()) one.destroy();
    },
  };
  return view;
}
