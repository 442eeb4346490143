// The end of each log of a run's services and tasks, with search.

import { get, path, query } from "../api.js";
import { el, replaceIfChanged } from "../dom.js";
import { t } from "../language.js";

const FIRST = ["launch", "trainer", "sft", "dpo", "rm"]; // the log that is shown first, where there are several

export function open(holder, { run, values }) {
  const lines = el("pre", { class: "text log", tabindex: "0", role: "region", "aria-label": t("logs.log") });
  const search = el("input", { name: "search", class: "wide" });
  const chosen = el("select", { name: "log" });
  const view = {
    async refresh() {
      const { logs } = await get(path("runs", run));
      if (chosen.length !== logs.length) {
        const before = chosen.value || values.get("log");
        const first = FIRST.map((one) => logs.find((name) => name.startsWith(one))).find(Boolean);
        chosen.replaceChildren(...logs.map((name) => el("option", { value: name, selected: name === (before || first) }, name)));
      }
      const found = chosen.value ? await get(path("runs", run, "logs", chosen.value) + query({ search: search.value })) : [];
      const isAtEnd = lines.scrollTop + lines.clientHeight >= lines.scrollHeight - 4;
      replaceIfChanged(lines, [chosen.value, found], () => found.join("\n") || t("logs.nothing"));
      if (isAtEnd) lines.scrollTop = lines.scrollHeight;
    },
  };
  const form = el("form", { class: "filters", on: { submit: (event) => { event.preventDefault(); view.refresh(); }, change: () => view.refresh() } },
    el("label", {}, t("bar.log"), chosen), el("label", {}, t("logs.lines"), search), el("button", { type: "submit" }, t("search")));
  holder.append(el("h1", {}, t("nav.logs")), form, lines);
  return view;
}
