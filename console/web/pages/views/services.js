// The services of a run; the least and the greatest value beside the mean, because one sick engine hides in a mean.

import { get, path } from "../api.js";
import { el, number, panel, percent, replaceIfChanged, seconds, table } from "../dom.js";
import { said, t } from "../language.js";

export function open(holder, { run }) {
  const services = el("div");
  const spread = el("div");
  const queues = el("div");
  holder.append(el("h1", {}, t("nav.services")), panel(t("nav.services"), services), panel(t("services.spread"), spread), panel(t("services.queues"), queues));
  return {
    async refresh() {
      const found = await get(path("runs", run, "services"));
      replaceIfChanged(services, found.services, () => table(t("nav.services"), [
        [t("col.service"), (row) => row.name],
        [t("col.state"), (row) => el("span", { class: row.alive ? "good" : row.has_exited ? "dim" : "bad" }, row.alive ? said(row.state) : row.has_exited ? t("services.stopped") : t("services.lost", { time: seconds(row.silent_s) }))],
        [t("col.version"), (row) => number(row.version), "num"],
        [t("col.behind"), (row) => number(row.lag), "num"],
        [t("col.tokens-per-s"), (row) => (row.role === "rollout" ? number(row.tokens_per_s, 0) : "–"), "num"],
        [t("col.waits"), (row) => percent(row.idle_share), "num"],
        [t("col.starts"), (row) => number(row.num_starts), "num"],
        [t("col.figures"), (row) => el("details", {}, el("summary", {}, t("services.num-figures", { n: Object.keys(row.figures).length })),
          table(t("services.figures-of", { name: row.name }), [[t("col.figure"), (one) => one[0]], [t("col.value"), (one) => number(one[1]), "num"]], Object.entries(row.figures)))],
      ], found.services, t("services.none")));
      const rows = Object.entries(found.spread).flatMap(([role, figures]) => Object.entries(figures).filter(([, one]) => one.min || one.max).map(([name, one]) => ({ role, name, ...one }))); // without those that are 0
      replaceIfChanged(spread, rows, () => table(t("services.spread"), [
        [t("col.role"), (row) => said(row.role)], [t("col.figure"), (row) => row.name], [t("col.least"), (row) => number(row.min), "num"],
        [t("col.mean"), (row) => number(row.mean), "num"], [t("col.greatest"), (row) => number(row.max), "num"], [t("col.services"), (row) => number(row.num), "num"],
      ], rows));
      const stages = [...new Set([...Object.keys(found.queues.waiting), ...Object.keys(found.queues.held)])];
      replaceIfChanged(queues, found.queues, () => table(t("services.queues"), [
        [t("col.stage"), (stage) => said(stage)], [t("col.waiting"), (stage) => number(found.queues.waiting[stage] ?? null), "num"], [t("col.held"), (stage) => number(found.queues.held[stage] ?? null), "num"],
      ], stages));
    },
  };
}
