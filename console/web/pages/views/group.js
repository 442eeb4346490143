// One group side by side: rewards and their parts, the conversation, and every token with what is known of it.

import { get, path, query } from "../api.js";
import { el, number, pairs, panel, replace, shown } from "../dom.js";
import { said, t } from "../language.js";

const TOKENS = 1024;

export function open(holder, { run, values }) {
  const id = values.get("id") || "";
  const chapter = values.get("chapter");
  const body = el("div");
  holder.append(el("h1", {}, t("group.title", { id })), body);
  return {
    periodMs: 0,
    async refresh() {
      const found = await get(path("runs", run, "group") + query({ group_id: id, chapter }));
      const viewer = tokenViewer(run, id, chapter);
      replace(body,
        panel(t("group.panel"), pairs([
          [t("col.status"), said(found.status) + (found.reason ? `: ${said(found.reason)} (${said(found.meaning)})` : "")],
          [t("col.step"), number(found.step)], [t("col.trained-version"), number(found.trained_version)],
          [t("col.sampled-versions"), found.oldest_version === undefined ? "–" : [...new Set([found.oldest_version, found.newest_version])].join("–")],
          [t("col.staleness"), number(found.staleness)], [t("col.reward"), found.scorer && found.scorer !== found.reward_name ? t("group.scored", { reward: found.reward_name, scorer: found.scorer }) : found.reward_name || "–"],
          [t("col.ground-truth"), truth(found.ground_truth) || "–"], [t("col.data-source"), found.data_source || "–"],
          ...(found.environment ? [[t("col.environment"), found.environment]] : []),
        ])),
        panel(found.prompt_tokens ? t("group.prompt-tokens", { n: found.prompt_tokens }) : t("group.prompt"), el("pre", { class: "text", tabindex: "0" }, found.prompt || "–")),
        found.problem ? el("p", { class: "warn" }, said(found.problem)) : null,
        el("h2", {}, t("group.num", { n: found.trajectories.length, all: number(found.num_trajectories ?? 0) })),
        el("div", { class: "side", tabindex: "0", role: "region", "aria-label": t("group.side") },
          found.trajectories.map((one) => card(one, viewer))),
        viewer.element);
      const at = Number(values.get("at"));
      if (values.get("at") !== null && found.trajectories[at]) viewer.show(at, 0);
    },
  };
}

// Of JSON; a text is shown without its quotes.
function truth(text) {
  try {
    return typeof JSON.parse(text) === "string" ? JSON.parse(text) : text;
  } catch {
    return text; // cut
  }
}

function card(one, viewer) {
  const kind = one.reward === null ? "" : one.reward > 0 ? "good" : "bad";
  return el("section", { class: "panel", "aria-label": t("group.trajectory", { n: one.index }), data: { trajectory: one.index } },
    el("h2", {}, `#${one.index} `, el("span", { class: kind, data: { reward: String(one.reward) } }, t("group.reward", { n: number(one.reward) })), one.is_baseline ? t("group.baseline") : ""),
    pairs([
      ...Object.entries(one.parts).map(([name, value]) => [name, number(value)]),
      [t("col.ended"), said(one.status || one.finish_reason)], [t("col.tokens"), number(one.tokens)],
      [t("col.logprob"), t("group.logprobs", { mean: number(one.logprob_mean), min: number(one.logprob_min) })],
      ...(one.ratio ? [[t("col.ratio"), t("group.ratio", { mean: number(one.ratio.mean), min: number(one.ratio.min), max: number(one.ratio.max) })],
        [t("col.clipped-rejected"), t("group.outcomes", { clipped: number(one.ratio.num_clipped), rejected: number(one.ratio.num_rejected) })]] : []),
      [t("col.versions"), one.versions.join(", ")],
    ]),
    one.messages.length ? conversation(one) : el("pre", { class: "text", tabindex: "0" }, one.completion + (one.is_cut ? " …" : "")),
    one.rows.map((length, row) => el("button", { type: "button", on: { click: () => viewer.show(one.index, row) } },
      one.rows.length > 1 ? t("group.tokens-of-row", { row, n: length }) : t("group.tokens-n", { n: length }))));
}

function conversation(one) {
  const rewards = one.turns.filter((turn) => turn.reward !== 0).map((turn) => t("group.turn", { n: turn.number, reward: number(turn.reward) }));
  return el("div", {},
    one.messages.map((message) => el("div", {}, el("strong", {}, message.role || t("group.message")), el("pre", { class: "text", tabindex: "0" }, message.content))),
    el("p", { class: "dim" }, rewards.length ? t("group.turn-rewards", { n: one.turns.length, rewards: rewards.join(", ") }) : t("group.turns", { n: one.turns.length })));
}

function tokenViewer(run, id, chapter) {
  const title = el("h2", {}, t("group.tokens"));
  const box = el("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": t("group.tokens") });
  const detail = el("p", { role: "status" }, t("group.choose"));
  const colour = el("select", { "aria-label": t("group.colour-label"), on: { change: () => paint() } },
    ["logprob", "ratio", "version", "mask"].map((value) => el("option", { value }, t(`colour.${value}`))));
  const ratio = el("p", { class: "dim", data: { ratio: "" } });
  const later = el("button", { type: "button" }, t("group.later"));
  const earlier = el("button", { type: "button" }, t("group.earlier"));
  const element = el("section", { class: "panel", "aria-label": t("group.tokens") }, title, el("label", {}, t("group.colour"), colour), box, detail, ratio, earlier, later);
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
    const known = { n: found.first + at, id: found.ids[at], logprob: found.logprobs[at], p: number(Math.exp(found.logprobs[at])), version: found.versions[at] };
    const sampled = [t("token.sampled", known), found.ratios ? t("token.ratio", { current: found.current_logprobs[at], ratio: found.ratios[at] }) : "", found.outcomes?.[at] ? said(found.outcomes[at]) : ""];
    detail.textContent = shown(found.loss_mask[at] ? sampled.filter(Boolean).join(", ") : t("token.context", known));
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
    title.textContent = shown(t("token.title-of", { trajectory: row ? t("token.row", { n: trajectory, row }) : t("token.trajectory", { n: trajectory }), first: found.first, last: found.first + found.ids.length, all: found.total }));
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
    ratio.textContent = shown(said(found.current_problem) || LEGEND);
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

const LEGEND = t("token.legend");

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
