// What a run has learned, and what keeps it from learning faster.

import { get, path, query } from "../api.js";
import { axes, bars, LineChart, picked, toolbar } from "../charts.js";
import { runBar } from "../run_bar.js";
import { el, number, panel, percent, replaceIfChanged, seconds, table, tile } from "../dom.js";

const POINTS = 500;
const MOST_LINES = 6;
const MOST_CHARTS = 40; // of the figures of a script
const OF_ANSWERS = ["Loss", "Held-out loss", "Preferences", "Gradient norm", "Learning rate"]; // first, for sft, dpo and rm
const FIRST = [/reward/, /loss/, /^eval/, /kl/, /entropy/, /clip/]; // figures of a script

// title, figures as [name, label], options
const CHARTS = [
  ["Reward", [["reward_mean", "mean"]], { note: "mean of each step; the band is the least and greatest of a bucket, or one standard deviation" }],
  ["Reward by part", parts, {}],
  ["Reward by environment", (names) => startingWith(names, "environment reward: "), {}],
  ["Turns by environment", (names) => startingWith(names, "environment turns: "), {}],
  ["Tokens of an episode by environment", (names) => startingWith(names, "environment tokens: "), {}],
  ["Failed attempts by environment", (names) => startingWith(names, "environment failures: "), {}],
  ["Staleness of what was trained", [["staleness_mean", "mean"], ["staleness_max", "greatest"]], { note: "versions behind, by token", zero: true }],
  ["Seconds of a step", [["step_s", "training"], ["wait_s", "waiting for groups"], ["publish_s", "publishing"]], { note: "long waiting: generation is the bottleneck", zero: true }],
  ["Tokens trained per second", [["tokens_per_s", "tokens/s"]], { note: "of the whole step, waiting included", zero: true }],
  ["Spread of the reward", [["reward_std", "standard deviation"]], { zero: true }],
  ["KL to the reference", [["kl_reference", "KL"]], { zero: true, band: "kl_reference" }],
  ["Completion length", [["completion_tokens_mean", "tokens"]], { zero: true }],
  ["Critic", [["value_loss", "loss"]], { zero: true }],
  ["Explained variance", [["explained_variance", "of the critic"]], {}],
  ["Clipped tokens", [["clip_fraction", "share"]], { zero: true, band: "clip_fraction" }],
  ["KL between sampler and policy", [["kl_behaviour", "KL"]], { zero: true, band: "kl_behaviour" }],
  ["Entropy", [["entropy", "nats per token"]], { zero: true, band: "entropy" }],
  ["Effective sample size", [["ess_share", "share"]], { band: "ess_share" }],
  ["Degenerate groups", [["zero_signal_groups", "share with equal rewards"]], { zero: true, band: "zero_signal_groups" }],
  ["Truncated completions", [["truncated_share", "share"]], { zero: true, band: "truncated_share" }],
  ["Difference of engine and trainer", [["engine_gap", "mean"]], { zero: true, band: "engine_gap" }],
  ["Loss", [["loss", "loss"]], {}],
  ["Gradient norm", [["grad_norm", "before clipping"]], { zero: true }],
  ["Gradient norm by layers", (names) => byKind(names, "gradient norm: "), {}],
  ["Update to weight ratio", [["update_ratio", "all weights"]], { note: "norm of a step's change over the norm of the weights" }],
  ["Update to weight ratio by layers", (names) => byKind(names, "update ratio: "), {}],
  ["Floating-point operations per second", [["flops_per_s", "FLOP/s"]], { zero: true }],
  ["Share of the peak (MFU)", [["mfu", "share"]], { zero: true }],
  ["Held-out loss", [["eval_loss", "loss"]], {}],
  ["Preferences", [["rewards/accuracies", "share with the chosen answer above"], ["rewards/margins", "margin"]], {}],
  ["Pairs beside the groups", [["pair_accuracy", "share with the chosen answer above"], ["pair_margin", "margin"]], {}],
  ["Learning rate", [["lr", "used"], ["lr_set", "set"]], { zero: true }],
];

export function open(holder, { run }) {
  const tiles = el("div", { class: "tiles" });
  const diagnoses = el("div");
  const grid = el("div", { class: "grid" });
  const charts = new Map();
  const held = new Map();
  const staleness = el("div");
  const incidents = el("div");
  const bar = runBar(run);
  const summary = el("div");
  let tools = null;
  holder.append(el("h1", {}, run), bar.element, tiles, diagnoses, summary, grid);
  const side = [panel("Tokens by staleness", staleness), panel("Events", incidents)];

  const chart = (title, options) => {
    if (!charts.has(title)) {
      charts.set(title, new LineChart(title, options));
      grid.append(charts.get(title).element);
    }
    return charts.get(title);
  };

  return {
    async refresh() {
      const [found, metrics] = await Promise.all([
        get(path("runs", run, "summary")), get(path("runs", run, "metrics") + query({ points: POINTS })), 
      ]);
      await bar.refresh(found.kind);
      if (!tools) {
        tools = toolbar(found.kind, () => this.refresh());
        grid.before(tools.element);
      }
      tools.names(metrics.names);
      const last = (name) => metrics.figures[name]?.mean.findLast((value) => value !== null);
      drawTiles(tiles, found, last);
      const words = metrics.names.filter((name) => name.startsWith("summary/"));
      replaceIfChanged(summary, words.map(last), () => (words.length ? panel("Summary", table("Summary", [["figure", (name) => name.slice(8)], ["value", (name) => number(last(name)), "num"]], words)) : null));
      drawDiagnoses(diagnoses, found);
      const outside = new Map(found.bands.map((band) => [band.name, band]));
      for (const [title, figures, options] of layout(found, metrics.names)) {
        const named = typeof figures === "function" ? figures(metrics.names) : figures;
        const known = named.filter(([name]) => metrics.figures[name]);
        if (!known.length) continue;
        const lines = known.slice(0, MOST_LINES).map(([name, label]) => ({ label, ...axes(metrics), ...metrics.figures[name] }));
        if (title === "Reward" && metrics.bucket === 1 && metrics.figures.reward_std) spread(lines[0], metrics.figures.reward_std.mean);
        const band = options.band && outside.get(options.band);
        const healthy = band ? `healthy: ${band.low ?? "−∞"} to ${band.high ?? "∞"}` : "";
        chart(title, { ...options, note: options.note || healthy }).set(lines, band && !band.is_healthy ? band.sentence : "");
        if (title === "Reward") drawHeldOut(found.evaluations, chart);
      }
      if (found.kind !== "train") side[0].remove();
      for (const one of side) if (!one.isConnected && (one !== side[0] || found.kind === "train")) grid.append(one);
      const ages = Object.keys(found.staleness_tokens);
      replaceIfChanged(staleness, found.staleness_tokens, () => bars("tokens by staleness in versions", { edges: ages.map(Number), counts: Object.values(found.staleness_tokens) }));
      const rows = found.incidents.slice().reverse().slice(0, 12);
      replaceIfChanged(incidents, rows, () => table("Events", [
        ["when", (one) => new Date(one.at * 1000).toLocaleTimeString()], ["what", (one) => one.text, "text"],
      ], rows));
    },
    close() {
      for (const one of [...charts.values(), ...held.values()]) one.destroy();
    },
  };
}

// The charts of a kind of run, and those of the figures that were picked.
function layout({ kind, labels }, names) {
  const single = (name) => [labels[name] || name, [[name, name]], { band: name }];
  if (kind === "log") {
    const rank = (name) => (FIRST.findIndex((one) => one.test(name)) >>> 0); // one that has none is last
    const gpus = names.filter((name) => /^gpu\/\d+\//.test(name));
    const uses = [...new Set(gpus.map((name) => name.split("/").slice(2).join("/")))];
    const own = names.filter((name) => !gpus.includes(name) && !/^(summary\/|epoch$)/.test(name)).sort((a, b) => rank(a) - rank(b));
    const shown = own.filter((name, at) => at < MOST_CHARTS || picked(kind).includes(name));
    return [...shown.map(single), ...uses.map((use) => [`GPU ${use}`, gpus.filter((name) => name.endsWith(`/${use}`)).map((name) => [name, name.split("/")[1]]), {}])];
  }
  const place = ([title]) => (kind === "train" || !OF_ANSWERS.includes(title) ? OF_ANSWERS.length : OF_ANSWERS.indexOf(title));
  return [...[...CHARTS].sort((a, b) => place(a) - place(b)), ...picked(kind).map(single)];
}

function drawHeldOut(evaluations, chart) {
  for (const one of evaluations) {
    const points = one.points.filter((point) => point[one.measure] !== null);
    const values = points.map((point) => point[one.measure]);
    const title = `Held-out ${one.measure}: ${one.split}`;
    chart(title, { note: one.success ? `correct: ${one.success}` : "" }).set(
      [{ label: one.measure, steps: points.map((point) => point.step), mean: values, min: values, max: values }]);
  }
}

function spread(line, deviations) {
  line.min = line.mean.map((value, at) => (value === null || deviations[at] === null ? value : value - deviations[at]));
  line.max = line.mean.map((value, at) => (value === null || deviations[at] === null ? value : value + deviations[at]));
}

function parts(names) {
  return startingWith(names, "reward part ").filter(([, part]) => !part.includes("."));
}

function startingWith(names, beginning) {
  return names.filter((name) => name.startsWith(beginning)).map((name) => [name, name.slice(beginning.length)]);
}

// attention, embedding, head, mlp, norm; ranges of blocks are in the run's figures too
function byKind(names, beginning) {
  return startingWith(names, beginning).filter(([, layers]) => !layers.startsWith("block"));
}

function drawTiles(holder, found, last) {
  if (found.kind !== "train") {
    const figures = { loss: last("loss") ?? last("policy_loss") ?? last("train/loss"), "held-out loss": last("eval_loss"), reward: last("reward_mean") ?? last("reward"), "learning rate": last("lr"), epoch: last("epoch") };
    const known = Object.entries(figures).filter(([, value]) => value !== undefined).map(([name, value]) => [name, number(value)]);
    const entries = [["state", found.state, "", found.state === "running" ? "good" : found.state === "failed" ? "bad" : ""], ["step", number(found.step), ""], ...known, ["time", seconds(found.elapsed_s)]];
    replaceIfChanged(holder, entries, () => entries.map((one) => tile(...one)));
    return;
  }
  const idle = Object.entries(found.idle_share).map(([role, share]) => `${role} waits ${percent(share)}`).join(", ");
  const dropped = Object.values(found.groups.dropped).reduce((sum, one) => sum + one, 0);
  const dead = Object.values(found.groups.dead_lettered).reduce((sum, one) => sum + one, 0);
  const entries = [
    ["state", found.state, found.doing, found.state === "running" ? "good" : found.state === "failed" ? "bad" : ""],
    ["step", `${number(found.step)}${found.total_steps ? ` of ${number(found.total_steps)}` : ""}`, found.eta_s ? `${seconds(found.eta_s)} to go` : ""],
    ["reward", number(found.reward), `first steps ${number(found.reward_first)}`],
    [found.held_out.measure === "accuracy" ? "held-out accuracy" : "held-out reward", number(found.held_out.now), `at first ${number(found.held_out.before)}`],
    ["tokens/s trained", number(found.trained_per_s, 0), `generated ${number(found.generated_per_s, 0)}${found.attention ? `, attention ${found.attention}` : ""}`],
    ["staleness", number(found.staleness_mean, 2), `at most ${number(found.staleness_max)} versions`],
    ["who waits", found.waiting_for || "–", found.slots_used === null ? idle : `${idle}; ${percent(found.slots_used)} of the engines' slots used`],
    ["groups trained", number(found.groups.trained), `${number(dropped)} dropped, ${number(dead)} dead letters`],
    ["version", number(found.newest_version), `${number(found.versions_published)} published`],
    ["time", seconds(found.elapsed_s), found.is_live ? (found.disconnected_s ? `NATS unreachable for ${seconds(found.disconnected_s)}` : "live") : "from the run's files"],
  ];
  replaceIfChanged(holder, entries, () => entries.map((one) => tile(...one)));
}

function drawDiagnoses(holder, found) {
  const lines = found.diagnoses.map((one) => el("li", {}, el("strong", {}, one.what), " ", one.cause, " ", el("span", { class: "good" }, one.cure)));
  const unreadable = Object.entries(found.unreadable).map(([what, count]) => el("li", {}, `${count} messages cannot be read and are left out: ${what}`));
  replaceIfChanged(holder, [found.diagnoses, found.unreadable, found.problem], () => [
    lines.length || unreadable.length ? panel("What to look at", el("ul", {}, lines, unreadable)) : null,
    found.problem ? el("p", { class: "dim" }, found.problem) : null,
  ]);
}
