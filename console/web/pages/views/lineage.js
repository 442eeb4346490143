// How a version came to be: its groups and rewards, and the versions before it.

import { get, path, query } from "../api.js";
import { el, number, pairs, panel, replace, table } from "../dom.js";
import { said, t } from "../language.js";
import { groupLink } from "./trajectories.js";

export function open(holder, { run, values }) {
  const field = el("input", { type: "number", min: "0", name: "version", value: values.get("version") || "" });
  const form = el("form", { class: "filters", on: { submit: (event) => { event.preventDefault(); location.hash = `#/run/${encodeURIComponent(run)}/lineage?version=${encodeURIComponent(field.value)}`; } } },
    el("label", {}, t("lineage.version"), field), el("button", { type: "submit" }, t("lineage.show")));
  const body = el("div");
  holder.append(el("h1", {}, t("nav.lineage")), form, body);
  return {
    periodMs: 0,
    async refresh() {
      const found = await get(path("runs", run, "lineage") + query({ version: values.get("version") }));
      const link = found.chain[0];
      const at = (version) => el("a", { href: `#/run/${encodeURIComponent(run)}/lineage?version=${version}` }, String(version));
      replace(body,
        panel(t("lineage.one", { n: found.version }), pairs([
          [t("col.made-by"), link.step === null ? (link.parent === null ? t("lineage.initial") : t("lineage.same", { n: link.parent })) : t("lineage.step", { step: link.step, n: link.parent })],
          [t("col.trainer"), t("lineage.holder", { holder: found.holder, epoch: found.epoch })], [t("col.weights"), link.weights_digest],
          [t("col.groups"), number(found.groups.length)], [t("col.filtered"), Object.entries(found.skipped).map(([why, count]) => `${count} ${said(why)}`).join(", ") || t("table.none")],
          [t("col.prompts-before"), number(found.num_prompts)], [t("col.scored-by"), Object.entries(found.scorers).map(([name, count]) => t("lineage.scored", { name, n: count })).join(", ") || "–"],
          [t("col.made-with"), Object.entries(found.environment).map(([name, version]) => `${name} ${version}`).join(", ") || "–"],
        ])),
        panel(t("lineage.groups"), table(t("traj.groups"), [
          [t("col.group"), (row) => groupLink(run, { group_id: row.group_id, chapter: found.chapters[link.step] })],
          [t("col.rewards"), (row) => row.rewards.map((one) => number(one, 2)).join("  "), "text"], [t("col.scorer"), (row) => row.scorer],
          [t("col.sampled-by"), (row) => (row.oldest_version === row.newest_version ? t("lineage.one-lower", { n: row.oldest_version }) : t("lineage.versions", { low: row.oldest_version, high: row.newest_version }))],
          [t("col.tokens"), (row) => number(row.num_tokens), "num"], [t("col.use"), (row) => number(row.use), "num"],
        ], found.groups)),
        panel(t("lineage.before-n", { n: number(found.num_links) }), table(t("lineage.before"), [
          [t("col.version"), (row) => at(row.version), "num"], [t("col.step"), (row) => number(row.step), "num"], [t("col.on-version"), (row) => (row.parent === null ? "–" : at(row.parent)), "num"],
          [t("col.groups"), (row) => number(row.num_groups), "num"], [t("col.reward"), (row) => number(row.reward), "num"], [t("col.weights"), (row) => row.weights_digest.slice(0, 16)],
        ], found.chain)));
    },
  };
}
