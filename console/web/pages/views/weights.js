// The versions of a run: when each was published, what was sent, and what each worker took to adopt it.

import { get, path, query } from "../api.js";
import { LineChart } from "../charts.js";
import { bytes, clock, el, number, panel, replaceIfChanged, seconds, table } from "../dom.js";

export function open(holder, { run }) {
  const serving = el("div");
  const list = el("div");
  const pause = new LineChart("Pause of generation, seconds", { note: "mean over the workers; the band is the least and greatest", zero: true });
  const fetch = new LineChart("Fetching, seconds", { note: "mean over the workers; the band is the least and greatest", zero: true });
  const size = new LineChart("Bytes sent to the store", { zero: true });
  const older = el("button", { type: "button", on: { click: () => load(true) } }, "Older versions");
  older.hidden = true;
  holder.append(el("h1", {}, "Weights"), el("div", { class: "grid" }, size.element, fetch.element, pause.element), panel("Served now", serving), panel("Versions", list, older));
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
    pause.set([line("pause", "pause_s")]);
    fetch.set([line("fetch", "fetch_s")]);
    const sent = ordered.map((one) => one.sent_bytes);
    size.set([{ label: "sent", steps, mean: sent, min: sent, max: sent }]);
    const served = Object.entries(newest.serving).map(([worker, version]) => ({ worker, version, lag: (newest.newest ?? version) - version, stages: stages(newest.apply_s[worker] ?? {}) }));
    replaceIfChanged(serving, served, () => table("Served now", [
      ["worker", (row) => row.worker], ["version", (row) => number(row.version), "num"], ["behind", (row) => number(row.lag), "num"], ["mean of a version, by stage", (row) => row.stages || "–", "text"],
    ], served));
    replaceIfChanged(list, rows, () => table("Versions", [
      ["version", (row) => el("a", { href: `#/run/${encodeURIComponent(run)}/lineage?version=${row.version}` }, String(row.version))],
      ["step", (row) => number(row.step), "num"], ["published", (row) => clock(row.published_at)], ["kind", (row) => row.kind || "–"],
      ["sent", (row) => bytes(row.sent_bytes), "num"], ["publishing", (row) => seconds(row.publish_s), "num"], ["of it", (row) => stages({ compare: row.compare_s, upload: row.upload_s }) || "–", "text"],
      ["workers", (row) => el("details", {}, el("summary", {}, number(row.num_adopted)), table(`Workers of version ${row.version}`, [
        ["worker", (one) => one.worker], ["from", (one) => number(one.from), "num"], ["fetch", (one) => seconds(one.fetch_s), "num"], ["pause", (one) => seconds(one.pause_s), "num"], ["bytes", (one) => bytes(one.bytes), "num"],
      ], row.workers)), "num"],
      ["fetch", (row) => spread(row.fetch_s), "num"], ["pause", (row) => spread(row.pause_s), "num"],
      ["refused", (row) => Object.entries(row.refused).map(([worker, why]) => `${worker}: ${why}`).join("; ") || "–", "text"],
    ], rows, "no version has been published, or no server of the run answers"));
  }

  return {
    refresh: () => load(false),
    close() {
      for (const one of [pause, fetch, size]) one.destroy();
    },
  };
}

function stages(found) {
  return Object.entries(found).filter(([, value]) => value !== null).map(([stage, value]) => `${stage} ${seconds(value)}`).join(", ");
}

function spread(one) {
  return one ? `${seconds(one.mean)} (${seconds(one.min)} to ${seconds(one.max)})` : "–";
}
