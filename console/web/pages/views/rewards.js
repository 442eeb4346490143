// The rewards of a run: how they are distributed, which endpoints give them, what failed, and a test by hand.

import { get, path, post } from "../api.js";
import { bars } from "../charts.js";
import { clock, el, number, panel, replaceIfChanged, seconds, table } from "../dom.js";

export function open(holder, { run }) {
  const distribution = el("div", { class: "grid" });
  const errors = el("div");
  const scorers = el("div");
  const service = el("div");
  const names = el("select", { name: "reward", "aria-label": "reward" });
  const prompt = el("input", { name: "prompt", class: "wide", maxlength: "20000" });
  const truth = el("input", { name: "ground_truth", maxlength: "20000" });
  const completions = el("textarea", { name: "completions", rows: "4", maxlength: "20000" });
  const result = el("div", { role: "status" });
  const form = el("form", { on: { submit: send } },
    el("label", {}, "reward", names), " ", el("label", {}, "prompt", prompt), " ", el("label", {}, "ground truth", truth),
    el("label", {}, "completions, one a line", completions), el("p", {}, el("button", { type: "submit" }, "Send a test")));
  holder.append(el("h1", {}, "Rewards"), panel("Distribution of the newest rewards", distribution), panel("Errors", errors),
    panel("Scored by", scorers), panel("Reward service", service), panel("Test a reward", form, result));

  async function send(event) {
    event.preventDefault();
    try {
      const lines = completions.value.split("\n").filter((line) => line !== "");
      const found = await post(path("runs", run, "rewards", "test"), { reward: names.value, prompt: prompt.value, ground_truth: truth.value || null, completions: lines });
      const one = found.results[0];
      const rows = one.error ? [] : one.scores.map((score, at) => ({ ...score, text: lines[at] }));
      result.replaceChildren(one.error ? el("p", { class: "bad" }, `${one.error.reason}: ${one.error.detail}`) : table("Scores", [
        ["completion", (row) => row.text, "text"], ["score", (row) => number(row.score), "num"],
        ["parts", (row) => Object.entries(row.parts).map(([name, value]) => `${name} ${number(value)}`).join(", ") || "–"],
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
        if (!own.length) return el("p", { class: "dim" }, found.problem || "no rewards yet");
        return own.map(([name, one]) => el("div", { data: { distribution: name } }, el("h2", {}, name), bars(name, one),
          el("p", { class: "dim" }, `${number(one.num)} values of ${number(found.distribution_steps)} steps, mean ${number(one.mean)}, ${number(one.min)} to ${number(one.max)}`)));
      });
      replaceIfChanged(errors, found.errors, () => table("Errors", [
        ["reason", (row) => row.reason], ["waited", (row) => number(row.waited), "num"], ["given up", (row) => el("span", { class: row.dead ? "bad" : "" }, number(row.dead)), "num"],
        ["newest", (row) => row.newest, "text"], ["when", (row) => clock(row.newest_at)],
      ], found.errors, "no reward failed"));
      const rows = Object.entries(found.scored_by);
      replaceIfChanged(scorers, rows, () => table("Scored by", [
        ["scorer", ([name]) => name], ["groups", ([, one]) => number(one.groups), "num"], ["steps", ([, one]) => `${one.first_step} to ${one.last_step}`],
      ], rows));
      replaceIfChanged(service, found.service, () => [
        found.service.problem ? el("p", { class: "warn" }, found.service.problem) : el("p", { class: "dim" }, found.service.url),
        table("Endpoints", [
          ["endpoint", (row) => row.endpoint.name], ["URL", (row) => row.endpoint.url, "text"], ["version", (row) => row.endpoint.version],
          ["breaker", (row) => el("span", { class: row.live.breaker === "closed" ? "good" : "bad" }, row.live.breaker)], ["calls", (row) => number(row.live.calls), "num"],
          ["failed", (row) => number(row.live.errors), "num"],
          ["p50", (row) => seconds(row.live.latency_p50_s), "num"], ["p99", (row) => seconds(row.live.latency_p99_s), "num"],
        ], found.service.endpoints, "no endpoint is registered"),
        table("Rewards", [["reward", (row) => row.name], ["kind", (row) => row.kind], ["description", (row) => row.description, "text"]], found.service.rewards),
      ]);
      const known = found.service.rewards.map((one) => one.name);
      replaceIfChanged(names, known, () => known.map((name) => el("option", { value: name }, name)));
    },
  };
}
