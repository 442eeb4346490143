// Create a run: by a few fields, from a run file, or as a copy of a run with changes. The console checks it as `penstock train` does.

import { get, path, post } from "../api.js";
import { el, panel, replace } from "../dom.js";
import { t } from "../language.js";
import { role, canChange } from "../run_bar.js";

const ALGORITHMS = ["grpo", "dapo", "gspo", "ppo", "rloo", "async_grpo", "sft", "dpo", "rm"];
// name of the API, kind
const FIELDS = [
  ["name", "text"], ["algorithm", "select"], ["model_path", "text"], ["train_data_path", "text"],
  ["eval_data_path", "text"], ["learning_rate", "number"], ["batch_size", "number"],
  ["num_epochs", "number"], ["rollout_n", "number"], ["kl_coef", "number"],
  ["context_length", "number"], ["num_gpus", "number"], ["description", "text"],
];
const MASK = "********";

// What a run was given, without what is the default, a secret, or its own name and folder.
function given({ settings, origins }) {
  const found = {};
  for (const [section, values] of Object.entries(settings)) {
    for (const [key, value] of Object.entries(values)) {
      const origin = origins ? origins[`${section}.${key}`] : ""; // sft, dpo and rm store none
      if (section === "run" || value === null || origin === undefined || origin === "default" || /^(environment|PENSTOCK_)/.test(origin) || JSON.stringify(value).includes(MASK)) continue;
      (found[section] = found[section] || {})[key] = value;
    }
  }
  return found;
}

export function open(holder, { values }) {
  const copied = values.get("copy");
  const said = el("p", { role: "status", "aria-live": "polite" });
  const inputs = Object.fromEntries(FIELDS.map(([name, kind]) => [name, kind === "select"
    ? el("select", { name }, ALGORITHMS.map((one) => el("option", { value: one }, one))) : el("input", { name, inputmode: kind === "number" ? "decimal" : null })]));
  const text = el("textarea", { name: "text", rows: "18", "aria-label": t("new.text"), on: { input: () => {
    for (const [name, input] of Object.entries(inputs)) input.disabled = !copied && name !== "name" && text.value.trim() !== ""; // a run file has them
  } } });
  const start = el("input", { type: "checkbox", checked: true });
  const byFields = panel(t("new.fields"), el("div", { class: "filters" }, FIELDS.map(([name]) => el("label", {}, t(`new.${name}`), inputs[name]))));

  let request = {};

  function body() {
    if (copied) return { ...request, run: inputs.name.value.trim(), settings: JSON.parse(text.value) };
    if (text.value.trim()) return { run: inputs.name.value.trim() || undefined, run_file: text.value };
    const fields = FIELDS.map(([name, kind]) => [name, kind, inputs[name].value.trim()]).filter(([, , value]) => value !== "");
    return Object.fromEntries(fields.map(([name, kind, value]) => [name, kind === "number" ? Number(value) : value]));
  }

  const form = el("form", { on: { submit: async (event) => {
    event.preventDefault();
    replace(said, t("new.checking"));
    try {
      const made = await post(path("runs"), { ...body(), start: start.checked });
      location.hash = `#/run/${encodeURIComponent(made.run)}/overview`;
    } catch (error) {
      replace(said, el("span", { class: "bad" }, error.message));
    }
  } } },
  copied ? panel(t("new.settings-of", { run: copied }), el("div", { class: "filters" }, el("label", {}, t("new.name"), inputs.name)), text)
    : [byFields, panel(t("new.file"), text)],
  el("p", {}, el("label", { class: "row" }, start, t("new.start")), " ", el("button", { type: "submit" }, t("new.create"))), said);
  holder.append(el("h1", {}, copied ? t("new.copy-of", { run: copied }) : t("new.title")), form);
  return {
    periodMs: 0,
    async refresh() {
      if (!canChange(await role())) replace(holder, el("p", {}, t("new.role")));
      else if (copied && !text.value) {
        const [config, status] = await Promise.all([get(path("runs", copied, "config")), get(path("runs", copied))]);
        text.value = JSON.stringify(given(config), null, 1);
        request = status.request;
        inputs.name.value = `${copied}-2`;
      }
    },
  };
}
