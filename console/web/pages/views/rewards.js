// The rewards of a run: how they are distributed, which endpoints give them, what failed, and a test by hand.

import { get, path, post } from "../api.js";
import { bars } from "../charts.js";
import { clock, el, number, panel, replaceIfChanged, seconds, table } from "../dom.js";
import { said, t } from "../language.js";

export function open(holder, { run }) {
  const distribution = el("div", { class: "grid" });
  const errors = el("div");
  const scorers = el("div");
  const service = el("div");
  const names = el("select", { name: "reward", "aria-label": t("rewards.reward") });
  const prompt = el("input", { name: "prompt", class: "wide", maxlength: "20000" });
  const truth = el("input", { name: "ground_truth", maxlength: "20000" });
  const completions = el("textarea", { name: "completions", rows: "4", maxlength: "20000" });
  const result = el("div", { role: "status" });
  const form = el("form", { on: { submit: send } },
    el("label", {}, t("rewards.reward"), names), " ", el("label", {}, t("rewards.prompt"), prompt), " ", el("label", {}, t("col.ground-truth"), truth),
    el("label", {}, t("rewards.completions"), completions), el("p", {}, el("button", { type: "submit" }, t("rewards.send"))));
  holder.append(el("h1", {}, t("nav.rewards")), panel(t("rewards.distribution"), distribution), panel(t("rewards.errors"), errors),
    panel(t("rewards.scored-by"), scorers), panel(t("rewards.service"), service), panel(t("rewards.test"), form, result));

  async function send(event) {
    event.preventDefault();
    result.replaceChildren(t("rewards.scoring"));
    try {
      const lines = completions.value.split("\n").filter((line) => line !== "");
      const found = await post(path("runs", run, "rewards", "test"), { reward: names.value, prompt: prompt.value, ground_truth: truth.value || null, completions: lines });
      const one = found.results[0];
      const rows = one.error ? [] : one.scores.map((score, at) => ({ ...score, text: lines[at] }));
      result.replaceChildren(one.error ? el("p", { class: "bad" }, `${said(one.error.reason)}: ${one.error.detail}`) : table(t("rewards.scores"), [
        [t("col.completion"), (row) => row.text, "text"], [t("col.score"), (row) => number(row.score), "num"],
        [t("col.parts"), (row) => Object.entries(row.parts).map(([name, value]) => `${name} ${number(value)}`).join(", ") || "–"],
      ], rows));
    } catch (error) {
      result.replaceChildren(el("p", { class: "bad" }, error.message));
    }
  }

  return {
    async refresh() {
      const found = await get(path("runs", run, "rewards"));
      replaceIfChanged(distribution, [found.distribution, found.problem], () => {
        const own = Object.entries(found.distribution);
        if (!own.length) return el("p", { class: "dim" }, said(found.problem) || t("rewards.none"));
        return own.map(([name, one]) => el("div", { data: { distribution: name } }, el("h2", {}, said(name)), bars(name, one),
          el("p", { class: "dim" }, t("rewards.values", { n: number(one.num), steps: number(found.distribution_steps), mean: number(one.mean), low: number(one.min), high: number(one.max) }))));
      });
      replaceIfChanged(errors, [found.errors, found.is_live], () => table(t("rewards.errors"), [
        [t("col.reason"), (row) => said(row.reason)], [t("col.waited"), (row) => number(row.waited), "num"], [t("col.given-up"), (row) => el("span", { class: row.dead ? "bad" : "" }, number(row.dead)), "num"],
        [t("col.newest"), (row) => row.newest, "text"], [t("col.when"), (row) => clock(row.newest_at)],
      ], found.errors, t(found.is_live ? "rewards.no-errors" : "rewards.not-live")));
      const rows = Object.entries(found.scored_by);
      replaceIfChanged(scorers, rows, () => table(t("rewards.scored-by"), [
        [t("col.scorer"), ([name]) => name], [t("col.groups"), ([, one]) => number(one.groups), "num"], [t("col.steps"), ([, one]) => t("chart.to", { low: one.first_step, high: one.last_step })],
      ], rows));
      replaceIfChanged(service, found.service, () => [
        found.service.problem ? el("p", { class: "dim" }, said(found.service.problem)) : el("p", { class: "dim" }, found.service.url),
        table(t("rewards.endpoints"), [
          [t("col.endpoint"), (row) => row.endpoint.name], [t("col.url"), (row) => row.endpoint.url, "text"], [t("col.version"), (row) => row.endpoint.version],
          [t("col.breaker"), (row) => el("span", { class: row.live.breaker === "closed" ? "good" : "bad" }, said(row.live.breaker))], [t("col.calls"), (row) => number(row.live.calls), "num"],
          [t("col.failed"), (row) => number(row.live.errors), "num"],
          [t("col.p50"), (row) => seconds(row.live.latency_p50_s), "num"], [t("col.p99"), (row) => seconds(row.live.latency_p99_s), "num"],
        ], found.service.endpoints, t("rewards.no-endpoint")),
        table(t("nav.rewards"), [[t("col.reward"), (row) => row.name], [t("col.kind"), (row) => row.kind], [t("col.description"), (row) => row.description, "text"]], found.service.rewards),
      ]);
      const known = found.service.rewards.map((one) => one.name);
      form.hidden = !known.length;
      replaceIfChanged(names, known, () => known.map((name) => el("option", { value: name, selected: name in found.scored_by }, name)));
    },
  };
}
