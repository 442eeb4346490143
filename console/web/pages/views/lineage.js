// How a version came to be: its groups and rewards, and the versions before it.

import { get, path, query } from "../api.js";
import { el, number, pairs, panel, replace, table } from "../dom.js";
import { groupLink } from "./trajectories.js";

export function open(holder, { run, values }) {
  const field = el("input", { type: "number", min: "0", name: "version", value: values.get("version") || "" });
  const form = el("form", { class: "filters", on: { submit: (event) => { event.preventDefault(); location.hash = `#/run/${encodeURIComponent(run)}/lineage?version=${encodeURIComponent(field.value)}`; } } },
    el("label", {}, "version (empty: the last)", field), el("button", { type: "submit" }, "Show"));
  const body = el("div");
  holder.append(el("h1", {}, "Lineage"), form, body);
  return {
    periodMs: 0,
    async refresh() {
      const found = await get(path("runs", run, "lineage") + query({ version: values.get("version") }));
      const link = found.chain[0];
      const at = (version) => el("a", { href: `#/run/${encodeURIComponent(run)}/lineage?version=${version}` }, String(version));
      replace(body,
        panel(`Version ${found.version}`, pairs([
          ["made by", link.step === null ? (link.parent === null ? "the initial model" : `the weights of version ${link.parent} again`) : `step ${link.step} on version ${link.parent}`],
          ["trainer", `${found.holder}, epoch ${found.epoch}`], ["weights", link.weights_digest],
          ["groups", number(found.groups.length)], ["filtered out of the loss", Object.entries(found.skipped).map(([why, count]) => `${count} ${why}`).join(", ") || "none"],
          ["prompts of all versions before", number(found.num_prompts)], ["scored by", Object.entries(found.scorers).map(([name, count]) => `${name}: ${count} groups`).join(", ") || "–"],
          ["made with", Object.entries(found.environment).map(([name, version]) => `${name} ${version}`).join(", ") || "–"],
        ])),
        panel("Groups of its step", table("Groups", [
          ["group", (row) => groupLink(run, { group_id: row.group_id, chapter: found.chapters[link.step] })],
          ["rewards", (row) => row.rewards.map((one) => number(one, 2)).join("  "), "text"], ["scorer", (row) => row.scorer],
          ["sampled by", (row) => (row.oldest_version === row.newest_version ? `version ${row.oldest_version}` : `versions ${row.oldest_version} to ${row.newest_version}`)],
          ["tokens", (row) => number(row.num_tokens), "num"], ["use", (row) => number(row.use), "num"],
        ], found.groups)),
        panel(`Versions before it (${number(found.num_links)})`, table("Versions before it", [
          ["version", (row) => at(row.version), "num"], ["step", (row) => number(row.step), "num"], ["on version", (row) => (row.parent === null ? "–" : at(row.parent)), "num"],
          ["groups", (row) => number(row.num_groups), "num"], ["reward", (row) => number(row.reward), "num"], ["weights", (row) => row.weights_digest.slice(0, 16)],
        ], found.chain)));
    },
  };
}
