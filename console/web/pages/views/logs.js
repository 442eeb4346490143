// The end of each log of a run's services and tasks, with search.

import { get, path, query } from "../api.js";
import { el, replaceIfChanged } from "../dom.js";

export function open(holder, { run, values }) {
  const lines = el("pre", { class: "text", tabindex: "0", role: "region", "aria-label": "Log" });
  const search = el("input", { name: "search", class: "wide" });
  const chosen = el("select", { name: "log" });
  const view = {
    async refresh() {
      const { logs } = await get(path("runs", run));
      if (chosen.length !== logs.length) {
        const before = chosen.value || values.get("log");
        chosen.replaceChildren(...logs.map((name) => el("option", { value: name, selected: name === before }, name)));
      }
      const found = chosen.value ? await get(path("runs", run, "logs", chosen.value) + query({ search: search.value })) : [];
      replaceIfChanged(lines, [chosen.value, found], () => found.join("\n") || "nothing");
    },
  };
  const form = el("form", { class: "filters", on: { submit: (event) => { event.preventDefault(); view.refresh(); }, change: () => view.refresh() } },
    el("label", {}, "log", chosen), el("label", {}, "lines with", search), el("button", { type: "submit" }, "Search"));
  holder.append(el("h1", {}, "Logs"), form, lines);
  return view;
}
