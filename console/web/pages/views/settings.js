// Every setting of a run with its origin, and against another run.

import { get, path, query } from "../api.js";
import { el, replaceIfChanged, table } from "../dom.js";
import { t } from "../language.js";

function flat(values, prefix = "") {
  return Object.entries(values).flatMap(([name, value]) => (value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length
    ? flat(value, `${prefix}${name}.`) : [[prefix + name, JSON.stringify(value)]]));
}

export function open(holder, { run }) {
  const list = el("div");
  const search = el("input", { name: "search", class: "wide", on: { input: () => draw() } });
  const own = el("input", { type: "checkbox", on: { change: () => draw() } });
  const other = el("select", { name: "other", on: { change: () => compare() } }, el("option", { value: "" }, t("settings.nothing")));
  let rows = [];
  let against = null;
  holder.append(el("h1", {}, t("nav.settings")), el("form", { class: "filters", on: { submit: (event) => event.preventDefault() } },
    el("label", {}, t("settings.search"), search), el("label", {}, t("settings.against"), other), el("label", { class: "row" }, own, t("settings.own"))), list);

  function draw() {
    const shown = (against || rows).filter((row) => row.key.includes(search.value.trim()) && (against || !own.checked || row.origin !== "default"));
    const columns = against ? [[run, (row) => row.values[0], "text"], [other.value, (row) => row.values[1], "text"]] : [[t("col.value"), (row) => row.value, "text"], [t("col.from"), (row) => row.origin, "text"]];
    replaceIfChanged(list, [shown, other.value], () => table(t("nav.settings"), [[t("col.setting"), (row) => row.key], ...columns], shown));
  }

  async function compare() {
    against = other.value ? (await get(path("settings-differences") + query({ run: [run, other.value] }))).differing : null;
    draw();
  }

  return {
    periodMs: 0,
    async refresh() {
      const [found, runs] = await Promise.all([get(path("runs", run, "config")), get(path("runs"))]);
      rows = flat(found.settings).map(([key, value]) => ({ key, value, origin: found.origins?.[key] || "" }));
      other.append(...runs.filter((one) => one.run !== run).map((one) => el("option", { value: one.run }, one.run)));
      draw();
    },
  };
}
