// One group side by side: rewards and their parts, the conversation, and every token with what is known of it.

import { get, path, query } from "../api.js";
import { el, number, pairs, panel, replace, shown } from "../dom.js";

const TOKENS = 1024;

export function open(holder, { run, values }) {
  const id = values.get("id") || "";
  const chapter = values.get("chapter");
  const body = el("div");
  holder.append(el("h1", {}, `Group ${id}`), body);
  return {
    periodMs: 0,
    async refresh() {
      const found = await get(path("runs", run, "group") + query({ group_id: id, chapter }));
      const viewer = tokenViewer(run, id, chapter);
      replace(body,
        panel("Group", pairs([
          ["status", found.status + (found.reason ? `: ${found.reason}` : "")],
          ["step", number(found.step)], ["trained on version", number(found.trained_version)],
          ["sampled by versions", found.oldest_version === undefined ? "–" : `${found.oldest_version} to ${found.newest_version}`],
          ["staleness", number(found.staleness)], ["reward", found.scorer ? `${found.reward_name}, by ${found.scorer}` : found.reward_name || "–"],
          ["ground truth", found.ground_truth || "–"], ["data source", found.data_source || "–"],
          ...(found.environment ? [["environment", found.environment]] : []),
        ])),
        panel(`Prompt${found.prompt_tokens ? `, ${found.prompt_tokens} tokens` : ""}`, el("pre", { class: "text", tabindex: "0" }, found.prompt || "–")),
        found.problem ? el("p", { class: "warn" }, found.problem) : null,
        el("h2", {}, `${found.trajectories.length} of ${number(found.num_trajectories ?? 0)} trajectories`),
        el("div", { class: "side", tabindex: "0", role: "region", "aria-label": "Trajectories side by side" },
          found.trajectories.map((one) => card(one, viewer))),
        viewer.element);
      const at = Number(values.get("at"));
      if (values.get("at") !== null && found.trajectories[at]) viewer.show(at, 0);
    },
  };
}

function card(one, viewer) {
  const kind = one.reward === null ? "" : one.reward > 0 ? "good" : "bad";
  return el("section", { class: "panel", "aria-label": `Trajectory ${one.index}`, data: { trajectory: one.index } },
    el("h2", {}, `#${one.index} `, el("span", { class: kind, data: { reward: String(one.reward) } }, `reward ${number(one.reward)}`), one.is_baseline ? " baseline" : ""),
    pairs([
      ...Object.entries(one.parts).map(([name, value]) => [name, number(value)]),
      ["ended", one.status || one.finish_reason], ["tokens", number(one.tokens)],
      ["log-probability", `mean ${number(one.logprob_mean)}, least ${number(one.logprob_min)}`],
      ...(one.ratio ? [["ratio", `mean ${number(one.ratio.mean)}, ${number(one.ratio.min)} to ${number(one.ratio.max)}`],
        ["clipped, rejected", `${number(one.ratio.num_clipped)}, ${number(one.ratio.num_rejected)} tokens`]] : []),
      ["versions", one.versions.join(", ")],
    ]),
    one.messages.length ? conversation(one) : el("pre", { class: "text", tabindex: "0" }, one.completion + (one.is_cut ? " …" : "")),
    one.rows.map((length, row) => el("button", { type: "button", on: { click: () => viewer.show(one.index, row) } },
      one.rows.length > 1 ? `Tokens of row ${row} (${length})` : `Tokens (${length})`)));
}

function conversation(one) {
  const rewards = one.turns.filter((turn) => turn.reward !== 0).map((turn) => `turn ${turn.number}: ${number(turn.reward)}`);
  return el("div", {},
    one.messages.map((message) => el("div", {}, el("strong", {}, message.role || "message"), el("pre", { class: "text", tabindex: "0" }, message.content))),
    el("p", { class: "dim" }, `${one.turns.length} turns${rewards.length ? `; rewards of turns: ${rewards.join(", ")}` : ""}`));
}

function tokenViewer(run, id, chapter) {
  const title = el("h2", {}, "Tokens");
  const box = el("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "Tokens" });
  const detail = el("p", { role: "status" }, "Choose a token to see its log-probabilities, their ratio, the version that sampled it and its loss mask.");
  const colour = el("select", { "aria-label": "Colour by", on: { change: () => paint() } },
    [["logprob", "log-probability"], ["ratio", "ratio"], ["version", "version"], ["mask", "loss mask"]].map(([value, text]) => el("option", { value }, text)));
  const ratio = el("p", { class: "dim", data: { ratio: "" } });
  const later = el("button", { type: "button" }, "Later tokens");
  const earlier = el("button", { type: "button" }, "Earlier tokens");
  const element = el("section", { class: "panel", "aria-label": "Tokens" }, title, el("label", {}, "colour by", colour), box, detail, ratio, earlier, later);
  element.hidden = true;
  let found = null;
  let spans = [];

  function paint() {
    const versions = [...new Set(found.versions.filter((one) => one !== null))];
    spans.forEach((span, at) => {
      span.className = found.loss_mask[at] ? "" : "context";
      if (!found.loss_mask[at]) return;
      if (colour.value === "logprob") span.classList.add(heat(found.logprobs[at]));
      else if (colour.value === "ratio") mark(span, found.ratios?.[at], found.outcomes?.[at]);
      else if (colour.value === "version") span.classList.add(`v${versions.indexOf(found.versions[at]) % 4}`);
      else span.classList.add("sampled");
    });
  }

  function choose(at) {
    spans.forEach((span) => span.classList.remove("chosen"));
    spans[at].classList.add("chosen");
    const sampled = found.loss_mask[at];
    detail.textContent = shown(`token ${found.first + at}: id ${found.ids[at]}, ` + (sampled
      ? `log-probability ${found.logprobs[at]} (probability ${number(Math.exp(found.logprobs[at]))}), sampled by version ${found.versions[at]}, in the loss${found.ratios ? `; of the trainer before its step ${found.current_logprobs[at]}, ratio ${found.ratios[at]}${found.outcomes[at] ? `, ${found.outcomes[at]}` : ""}` : ""}`
      : "context: not sampled, not in the loss"));
    detail.dataset.token = String(found.first + at);
  }

  async function show(trajectory, row, first = 0) {
    element.hidden = false;
    try {
      found = await get(path("runs", run, "tokens") + query({ group_id: id, chapter, trajectory, row, from: first, count: TOKENS }));
    } catch (error) {
      detail.textContent = shown(error.message);
      return;
    }
    title.textContent = shown(`Tokens of #${trajectory}${row ? `, row ${row}` : ""}: ${found.first} to ${found.first + found.ids.length} of ${found.total}`);
    spans = found.ids.map((token, at) => el("span", { role: "button", tabindex: at ? "-1" : "0", on: { click: () => choose(at) } },
      found.texts ? found.texts[at] || "∅" : `${token} `));
    replace(box, spans);
    box.onkeydown = (event) => {
      const here = spans.indexOf(document.activeElement);
      if (here < 0) return;
      const next = event.key === "ArrowRight" ? here + 1 : event.key === "ArrowLeft" ? here - 1 : -1;
      if (spans[next]) { spans[next].focus(); choose(next); event.preventDefault(); }
      if (event.key === "Enter" || event.key === " ") { choose(here); event.preventDefault(); }
    };
    ratio.textContent = shown(found.current_problem || LEGEND);
    ratio.dataset.ratio = found.ratios ? "yes" : "no";
    paint();
    earlier.hidden = found.first === 0;
    later.hidden = found.first + found.ids.length >= found.total;
    earlier.onclick = () => show(trajectory, row, Math.max(0, found.first - TOKENS));
    later.onclick = () => show(trajectory, row, found.first + found.ids.length);
    box.dataset.loaded = `${trajectory}.${row}.${found.first}`;
    element.scrollIntoView({ block: "nearest" });
  }

  return { element, show };
}

const LEGEND = "The ratio is exp(log-probability of the trainer before its step, less that of the sampler). Coloured by ratio: blue below 0.95, deep blue below 0.8, orange above 1.05, deep orange above 1.25; underlined: clipped by the loss; struck through: rejected by a correction.";

function mark(span, ratio, outcome) {
  if (ratio === null || ratio === undefined) return;
  if (ratio < 0.8) span.classList.add("low2");
  else if (ratio < 0.95) span.classList.add("low1");
  else if (ratio > 1.25) span.classList.add("high2");
  else if (ratio > 1.05) span.classList.add("high1");
  if (outcome.includes("clipped")) span.classList.add("clipped");
  if (outcome.includes("rejected")) span.classList.add("rejected");
}

function heat(logprob) {
  if (logprob > -0.1) return "heat0";
  if (logprob > -0.7) return "heat1";
  if (logprob > -2.3) return "heat2";
  return logprob > -4.6 ? "heat3" : "heat4";
}
