// The versions of a run: when each was published, what was sent, and what each worker took to adopt it.

import { get, path, query } from "../api.js";
import { LineChart } from "../charts.js";
import { bytes, clock, el, number, panel, replaceIfChanged, seconds, table } from "../dom.js";
import { has, said, t } from "../language.js";

export function open(holder, { run }) {
  const serving = el("div");
  const list = el("div");
  const pause = new LineChart(t("weights.pause"), { note: t("weights.band"), zero: true });
  const fetch = new LineChart(t("weights.fetch"), { note: t("weights.band"), zero: true });
  const size = new LineChart(t("weights.bytes"), { zero: true });
  const older = el("button", { type: "button", on: { click: () => load(true) } }, t("weights.older"));
  older.hidden = true;
  holder.append(el("h1", {}, t("nav.weights")), el("div", { class: "grid" }, size.element, fetch.element, pause.element), panel(t("weights.served"), serving), panel(t("weights.versions"), list, older));
  let more = [];
  let cursor = null;

  async function load(isOlder) {
    const found = await get(path("runs", run, "versions") + query({ limit: 100, before: isOlder ? cursor : "" }));
    if (isOlder) more = [...more, ...found.versions];
    if (isOlder || cursor === null) cursor = found.next;
    older.hidden = cursor === null;
    if (!isOlder) newest = found;
    draw();
  }

  let newest = null;

  function draw() {
    const known = new Set(newest.versions.map((one) => one.version));
    const rows = [...newest.versions, ...more.filter((one) => !known.has(one.version))];
    const ordered = rows.slice().reverse();
    const steps = ordered.map((one) => one.version);
    const line = (label, name) => ({ label, steps, mean: ordered.map((one) => one[name]?.mean ?? null), min: ordered.map((one) => one[name]?.min ?? null), max: ordered.map((one) => one[name]?.max ?? null) });
    pause.set([line(t("weights.label-pause"), "pause_s")]);
    fetch.set([line(t("weights.label-fetch"), "fetch_s")]);
    const sent = ordered.map((one) => one.sent_bytes);
    size.set([{ label: t("weights.label-sent"), steps, mean: sent, min: sent, max: sent }]);
    const served = Object.entries(newest.serving).map(([worker, version]) => ({ worker, version, lag: (newest.newest ?? version) - version, stages: stages(newest.apply_s[worker] ?? {}), sources: newest.sources[worker] ?? {} }));
    replaceIfChanged(serving, served, () => table(t("weights.served"), [
      [t("col.worker"), (row) => row.worker], [t("col.version"), (row) => number(row.version), "num"], [t("col.behind"), (row) => number(row.lag), "num"], [t("col.by-stage"), (row) => row.stages || "–", "text"],
      [t("col.read-from"), (row) => listed(row.sources.bytes, bytes), "text"], [t("col.not-shared"), (row) => listed(row.sources.misses, number), "text"], [t("col.not-peer"), (row) => listed(row.sources.peer_misses, number), "text"],
    ], served));
    replaceIfChanged(list, rows, () => table(t("weights.versions"), [
      [t("col.version"), (row) => el("a", { href: `#/run/${encodeURIComponent(run)}/lineage?version=${row.version}` }, String(row.version))],
      [t("col.step"), (row) => number(row.step), "num"], [t("col.published"), (row) => clock(row.published_at)], [t("col.kind"), (row) => said(row.kind) || "–"],
      [t("col.sent"), (row) => bytes(row.sent_bytes), "num"], [t("col.publishing"), (row) => seconds(row.publish_s), "num"], [t("col.of-it"), (row) => stages({ compare: row.compare_s, upload: row.upload_s }) || "–", "text"],
      [t("col.workers"), (row) => el("details", {}, el("summary", {}, number(row.num_adopted)), table(t("weights.workers-of", { n: row.version }), [
        [t("col.worker"), (one) => one.worker], [t("col.from-version"), (one) => number(one.from), "num"], [t("col.fetch"), (one) => seconds(one.fetch_s), "num"], [t("col.pause"), (one) => seconds(one.pause_s), "num"], [t("col.bytes"), (one) => bytes(one.bytes), "num"],
      ], row.workers)), "num"],
      [t("col.fetch"), (row) => spread(row.fetch_s), "num"], [t("col.pause"), (row) => spread(row.pause_s), "num"],
      [t("col.refused"), (row) => Object.entries(row.refused).map(([worker, why]) => `${worker}: ${why}`).join("; ") || "–", "text"],
    ], rows, t("weights.none")));
  }

  return {
    refresh: () => load(false),
    close() {
      for (const one of [pause, fetch, size]) one.destroy();
    },
  };
}

function stages(found) {
  return Object.entries(found).filter(([, value]) => value !== null).map(([stage, value]) => `${said(stage)} ${seconds(value)}`).join(", ");
}

// Those that are not 0.
function listed(found, shown) {
  return Object.entries(found ?? {}).filter(([, value]) => value).map(([name, value]) => `${has(`source.${name}`) ? t(`source.${name}`) : name} ${shown(value)}`).join(", ") || "–";
}

function spread(one) {
  return one ? t("traj.reward", { mean: seconds(one.mean), low: seconds(one.min), high: seconds(one.max) }) : "–";
}
