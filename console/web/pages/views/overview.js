// What a run has learned, and what keeps it from learning faster.

import { get, path, query } from "../api.js";
import { axes, bars, LineChart, picked, toolbar } from "../charts.js";
import { runBar } from "../run_bar.js";
import { clock, el, number, panel, percent, replaceIfChanged, seconds, table, tile } from "../dom.js";
import { has, said, t } from "../language.js";

const POINTS = 500;
const STARTING = "waiting for the services"; // their NATS has still to be started
const MOST_LINES = 6;
const CHECKPOINTS = 12;
const MOST_CHARTS = 40; // of the figures of a script
const OF_ANSWERS = ["chart.loss", "chart.eval-loss", "chart.preferences", "chart.grad-norm", "chart.lr"]; // first, for sft, dpo and rm
const FIRST = [/reward/, /loss/, /^eval/, /kl/, /entropy/, /clip/]; // figures of a script

// keys of title, labels and note in the catalogue; figures as [name, label]; options
const CHARTS = [
  ["chart.reward", [["reward_mean", "label.mean"]], { note: "note.reward" }],
  ["chart.reward-parts", parts, {}],
  ["chart.env-reward", (names) => startingWith(names, "environment reward: "), {}],
  ["chart.env-turns", (names) => startingWith(names, "environment turns: "), {}],
  ["chart.env-tokens", (names) => startingWith(names, "environment tokens: "), {}],
  ["chart.env-failures", (names) => startingWith(names, "environment failures: "), {}],
  ["chart.staleness", [["staleness_mean", "label.mean"], ["staleness_max", "label.greatest"]], { note: "note.staleness", zero: true }],
  ["chart.seconds", [["step_s", "label.training"], ["wait_s", "label.waiting"], ["publish_s", "label.publishing"]], { note: "note.seconds", zero: true }],
  ["chart.speed", [["tokens_per_s", "label.tokens-per-s"]], { note: "note.speed", zero: true }],
  ["chart.reward-spread", [["reward_std", "label.std"]], { zero: true }],
  ["chart.kl-reference", [["kl_reference", "label.kl"]], { zero: true, band: "kl_reference" }],
  ["chart.length", [["completion_tokens_mean", "label.tokens"]], { zero: true }],
  ["chart.critic", [["value_loss", "label.loss"]], { zero: true }],
  ["chart.explained-variance", [["explained_variance", "label.of-critic"]], {}],
  ["chart.clipped", [["clip_fraction", "label.share"]], { zero: true, band: "clip_fraction" }],
  ["chart.kl-behaviour", [["kl_behaviour", "label.kl"]], { zero: true, band: "kl_behaviour" }],
  ["chart.entropy", [["entropy", "label.nats"]], { zero: true, band: "entropy" }],
  ["chart.ess", [["ess_share", "label.share"]], { band: "ess_share" }],
  ["chart.degenerate", [["zero_signal_groups", "label.equal-rewards"]], { zero: true, band: "zero_signal_groups" }],
  ["chart.truncated", [["truncated_share", "label.share"]], { zero: true, band: "truncated_share" }],
  ["chart.engine-gap", [["engine_gap", "label.mean"]], { zero: true, band: "engine_gap" }],
  ["chart.loss", [["loss", "label.loss"]], {}],
  ["chart.grad-norm", [["grad_norm", "label.before-clipping"]], { zero: true }],
  ["chart.grad-layers", (names) => byKind(names, "gradient norm: "), {}],
  ["chart.update-ratio", [["update_ratio", "label.all-weights"]], { note: "note.update-ratio" }],
  ["chart.update-layers", (names) => byKind(names, "update ratio: "), {}],
  ["chart.flops", [["flops_per_s", "label.flops"]], { zero: true }],
  ["chart.mfu", [["mfu", "label.share"]], { zero: true }],
  ["chart.eval-loss", [["eval_loss", "label.loss"]], {}],
  ["chart.preferences", [["rewards/accuracies", "label.chosen-above"], ["rewards/margins", "label.margin"]], {}],
  ["chart.pairs", [["pair_accuracy", "label.chosen-above"], ["pair_margin", "label.margin"]], {}],
  ["chart.lr", [["lr", "label.used"], ["lr_set", "label.set"]], { zero: true }],
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
  const checkpoints = el("div");
  const side = [panel(t("overview.staleness-tokens"), staleness), panel(t("overview.checkpoints"), checkpoints), panel(t("overview.events"), incidents)];

  const chart = (title, options) => {
    if (!charts.has(title)) {
      charts.set(title, new LineChart(title, options));
      grid.append(charts.get(title).element);
    }
    return charts.get(title);
  };

  return {
    async refresh() {
      const [found, metrics, versions] = await Promise.all([
        get(path("runs", run, "summary")), get(path("runs", run, "metrics") + query({ points: POINTS })), get(path("runs", run, "checkpoints")),
      ]);
      await bar.refresh(found.kind);
      if (!tools) {
        tools = toolbar(found.kind, () => this.refresh());
        grid.before(tools.element);
      }
      tools.names(metrics.names);
      const last = (name) => metrics.figures[name]?.mean.findLast((value) => value !== null);
      drawTiles(tiles, run, found, last);
      const words = metrics.names.filter((name) => name.startsWith("summary/"));
      replaceIfChanged(summary, words.map(last), () => (words.length ? panel(t("overview.summary"), table(t("overview.summary"), [[t("col.figure"), (name) => name.slice(8)], [t("col.value"), (name) => number(last(name)), "num"]], words)) : null));
      drawDiagnoses(diagnoses, found);
      const outside = new Map(found.bands.map((band) => [band.name, band]));
      for (const [title, figures, options] of layout(found, metrics.names)) {
        const named = typeof figures === "function" ? figures(metrics.names) : figures;
        const known = named.filter(([name]) => metrics.figures[name]);
        if (!known.length) continue;
        const lines = known.slice(0, MOST_LINES).map(([name, label]) => ({ label: has(label) ? t(label) : label, ...axes(metrics), ...metrics.figures[name] }));
        if (title === "chart.reward" && metrics.bucket === 1 && metrics.figures.reward_std) spread(lines[0], metrics.figures.reward_std.mean);
        const band = options.band && outside.get(options.band);
        const healthy = band ? t("overview.healthy", { low: band.low ?? "−∞", high: band.high ?? "∞" }) : "";
        const note = options.note ? t(options.note) : healthy;
        chart(has(title) ? t(title) : title, { ...options, note }).set(lines, band && !band.is_healthy ? sentence(band, found.diagnoses) : "");
        if (title === "chart.reward") drawHeldOut(found.evaluations, chart);
      }
      if (found.kind !== "train") side[0].remove();
      for (const one of side) if (!one.isConnected && (one !== side[0] || found.kind === "train")) grid.append(one);
      const ages = Object.keys(found.staleness_tokens);
      replaceIfChanged(staleness, found.staleness_tokens, () => bars(t("overview.by-staleness"), { edges: ages.map(Number), counts: Object.values(found.staleness_tokens) }));
      replaceIfChanged(checkpoints, versions, () => table(t("overview.checkpoints"), [
        [t("col.step"), (one) => number(one.step), "num"], [t("col.path"), (one) => one.path, "text"],
        [t("col.results"), (one) => Object.entries(one.eval_results).map(([name, value]) => `${name} ${number(value)}`).join(", ") || "–", "text"],
      ], versions.slice(-CHECKPOINTS).reverse()));
      const rows = found.incidents.slice().reverse().slice(0, 12);
      replaceIfChanged(incidents, rows, () => table(t("overview.events"), [
        [t("col.when"), (one) => clock(one.at)], [t("col.what"), (one) => said(one.text), "text"],
      ], rows));
    },
    close() {
      for (const one of [...charts.values(), ...held.values()]) one.destroy();
    },
  };
}

// The charts of a kind of run, and those of the figures that were picked.
function layout({ kind, labels }, names) {
  const single = (name) => [said(labels[name] || name), [[name, name]], { band: name }];
  if (kind === "log") {
    const rank = (name) => (FIRST.findIndex((one) => one.test(name)) >>> 0); // one that has none is last
    const gpus = names.filter((name) => /^gpu\/\d+\//.test(name));
    const uses = [...new Set(gpus.map((name) => name.split("/").slice(2).join("/")))];
    const own = names.filter((name) => !gpus.includes(name) && !/^(summary\/|epoch$)/.test(name)).sort((a, b) => rank(a) - rank(b));
    const shown = own.filter((name, at) => at < MOST_CHARTS || picked(kind).includes(name));
    return [...shown.map(single), ...uses.map((use) => [t("chart.gpu", { use }), gpus.filter((name) => name.endsWith(`/${use}`)).map((name) => [name, name.split("/")[1]]), {}])];
  }
  const place = ([title]) => (kind === "train" || !OF_ANSWERS.includes(title) ? OF_ANSWERS.length : OF_ANSWERS.indexOf(title));
  return [...[...CHARTS].sort((a, b) => place(a) - place(b)), ...picked(kind).map(single)];
}

// The sentence of a figure outside of its band is that of the API, or of a diagnosis.
function sentence(band, diagnoses) {
  const same = diagnoses.find((one) => `${one.what} ${one.cure}` === band.sentence);
  return same ? `${said(same.what)} ${said(same.cure)}` : said(band.sentence);
}

function drawHeldOut(evaluations, chart) {
  for (const one of evaluations) {
    const points = one.points.filter((point) => point[one.measure] !== null);
    const values = points.map((point) => point[one.measure]);
    const title = t("chart.held-out-of", { measure: said(one.measure), split: one.split });
    chart(title, { note: one.success ? t("overview.correct", { rule: one.success }) : "" }).set(
      [{ label: said(one.measure), steps: points.map((point) => point.step), mean: values, min: values, max: values }]);
  }
}

function spread(line, deviations) {
  const moved = (sign) => line.mean.map((value, at) => (value === null || deviations[at] === null ? value : value + sign * deviations[at]));
  Object.assign(line, { low: moved(-1), high: moved(1) });
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

function drawTiles(holder, run, found, last) {
  if (found.kind !== "train") {
    const figures = { [t("tile.loss")]: last("loss") ?? last("policy_loss") ?? last("train/loss"), [t("tile.eval-loss")]: last("eval_loss"), [t("tile.reward")]: last("reward_mean") ?? last("reward"), [t("tile.lr")]: last("lr"), [t("tile.epoch")]: last("epoch") };
    const known = Object.entries(figures).filter(([, value]) => value !== undefined).map(([name, value]) => [name, number(value)]);
    const entries = [[t("tile.state"), said(found.state), "", found.state === "running" ? "good" : found.state === "failed" ? "bad" : ""], [t("tile.step"), number(found.step), ""], ...known, [t("tile.time"), seconds(found.elapsed_s)]];
    replaceIfChanged(holder, entries, () => entries.map((one) => tile(...one)));
    return;
  }
  const idle = Object.entries(found.idle_share).map(([role, share]) => t("tile.waits", { role: said(role), share: percent(share) })).join(", ");
  const reasons = Object.entries(found.groups.dropped).filter(([, count]) => count).sort((a, b) => b[1] - a[1]);
  const dropped = reasons.map(([, count]) => count).reduce((sum, one) => sum + one, 0);
  const link = reasons.map(([name, count], at) => [at ? ", " : `${t("tile.dropped", { n: number(dropped) })} `, el("a", { href: `#/run/${encodeURIComponent(run)}/trajectories?status=dropped&reason=${encodeURIComponent(name)}` }, `${said(name)} ${number(count)}`)]);
  const dead = Object.values(found.groups.dead_lettered).reduce((sum, one) => sum + one, 0);
  const entries = [
    [t("tile.state"), said(found.state), found.state === "running" ? said(found.doing) : "", found.state === "running" ? "good" : found.state === "failed" ? "bad" : ""],
    [t("tile.step"), found.total_steps ? t("tile.of", { n: number(found.step), all: number(found.total_steps) }) : number(found.step), found.eta_s ? t("tile.to-go", { time: seconds(found.eta_s) }) : ""],
    [t("tile.reward"), number(found.reward), t("tile.reward-first", { n: number(found.reward_first) })],
    [found.held_out.measure === "accuracy" ? t("tile.held-out-accuracy") : t("tile.held-out-reward"), number(found.held_out.now), t("tile.at-first", { n: number(found.held_out.before) })],
    [t("tile.trained-per-s"), number(found.trained_per_s, 0), [found.is_live && t("tile.generated", { n: number(found.generated_per_s, 0) }), found.attention && t("tile.attention", { name: found.attention })].filter(Boolean).join(", ")],
    [t("tile.staleness"), number(found.staleness_mean, 2), t("tile.at-most", { n: number(found.staleness_max) })],
    [t("tile.who-waits"), found.waiting_for.split(", ").map(said).join(", ") || "–", found.slots_used === null ? idle : t("tile.slots", { idle, share: percent(found.slots_used) })],
    [t("tile.groups"), number(found.groups.trained), found.is_live || found.step ? [dropped ? link : t("tile.none-dropped"), found.is_live ? `, ${t("tile.dead", { n: number(dead) })}` : ""] : ""],
    [t("tile.version"), number(found.newest_version), found.is_live ? t("tile.published", { n: number(found.versions_published) }) : ""],
    [t("tile.time"), seconds(found.elapsed_s), found.is_live ? (found.disconnected_s ? t("tile.no-nats", { time: seconds(found.disconnected_s) }) : t("tile.live")) : t("tile.files")],
  ];
  replaceIfChanged(holder, [entries, reasons], () => entries.map((one) => tile(...one)));
}

function drawDiagnoses(holder, found) {
  const lines = found.diagnoses.map((one) => el("li", {}, el("strong", {}, said(one.what)), " ", said(one.cause), " ", el("span", { class: "good" }, said(one.cure))));
  const unreadable = Object.entries(found.unreadable).map(([what, count]) => el("li", {}, t("overview.unreadable", { n: count, what })));
  replaceIfChanged(holder, [found.diagnoses, found.unreadable, found.problem], () => [
    lines.length || unreadable.length ? panel(t("overview.look"), el("ul", {}, lines, unreadable)) : null,
    found.problem && found.state !== "finished" && found.doing !== STARTING ? el("p", { class: "dim" }, said(found.problem)) : null,
  ]);
}
