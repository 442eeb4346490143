// The services of a run; the least and the greatest value beside the mean, because one sick engine hides in a mean.

import { get, path } from "../api.js";
import { el, number, panel, percent, replaceIfChanged, seconds, table } from "../dom.js";

export function open(holder, { run }) {
  const services = el("div");
  const spread = el("div");
  const queues = el("div");
  holder.append(el("h1", {}, "Fleet"), panel("Services", services), panel("Least, mean and greatest", spread), panel("Queues", queues));
  return {
    async refresh() {
      const found = await get(path("runs", run, "workers"));
      replaceIfChanged(services, found.services, () => table("Services", [
        ["service", (row) => row.name],
        ["state", (row) => el("span", { class: row.alive ? "good" : row.has_exited ? "dim" : "bad" }, row.alive ? row.state : row.has_exited ? "stopped" : `lost for ${seconds(row.silent_s)}`)],
        ["version", (row) => number(row.version), "num"],
        ["behind", (row) => number(row.lag), "num"],
        ["tokens/s", (row) => (row.role === "rollout" ? number(row.tokens_per_s, 0) : "–"), "num"],
        ["waits", (row) => percent(row.idle_share), "num"],
        ["starts", (row) => number(row.num_starts), "num"],
        ["figures", (row) => el("details", {}, el("summary", {}, `${Object.keys(row.figures).length} figures`),
          table(`Figures of ${row.name}`, [["figure", (one) => one[0]], ["value", (one) => number(one[1]), "num"]], Object.entries(row.figures)))],
      ], found.services, "no service has sent a heartbeat while somebody looked"));
      const rows = Object.entries(found.spread).flatMap(([role, figures]) => Object.entries(figures).map(([name, one]) => ({ role, name, ...one })));
      replaceIfChanged(spread, rows, () => table("Least, mean and greatest", [
        ["role", (row) => row.role], ["figure", (row) => row.name], ["least", (row) => number(row.min), "num"],
        ["mean", (row) => number(row.mean), "num"], ["greatest", (row) => number(row.max), "num"], ["services", (row) => number(row.num), "num"],
      ], rows));
      const stages = [...new Set([...Object.keys(found.queues.waiting), ...Object.keys(found.queues.held)])];
      replaceIfChanged(queues, found.queues, () => table("Queues", [
        ["stage", (stage) => stage], ["waiting", (stage) => number(found.queues.waiting[stage] ?? null), "num"], ["held", (stage) => number(found.queues.held[stage] ?? null), "num"],
      ], stages));
    },
  };
}
