// The frame of the page: which view is shown, when it is read again, and what is said while the console does not answer.

import { get, path, Refused } from "./api.js";
import { clock, el, replace, shown } from "./dom.js";
import { switchLanguage, t } from "./language.js";
import * as compare from "./views/compare.js";
import * as deadLetters from "./views/dead_letters.js";
import * as services from "./views/services.js";
import * as group from "./views/group.js";
import * as logs from "./views/logs.js";
import * as newRun from "./views/new_run.js";
import * as settings from "./views/settings.js";
import * as lineage from "./views/lineage.js";
import * as overview from "./views/overview.js";
import * as rewards from "./views/rewards.js";
import * as runs from "./views/runs.js";
import * as sweeps from "./views/sweeps.js";
import * as trajectories from "./views/trajectories.js";
import * as weights from "./views/weights.js";

const PERIOD_MS = 2000;
const MOST_MS = 15000; // between two attempts while nothing answers

// name in the address: [view, label in the navigation]
const VIEWS = {
  overview: [overview, "nav.overview"], trajectories: [trajectories, "nav.trajectories"], services: [services, "nav.services"],
  weights: [weights, "nav.weights"], rewards: [rewards, "nav.rewards"], lineage: [lineage, "nav.lineage"],
  "dead-letters": [deadLetters, "nav.dead-letters"], settings: [settings, "nav.settings"], logs: [logs, "nav.logs"], group: [group, null],
};

const ALL_RUNS = { runs, compare, sweeps, new: newRun };

const main = document.getElementById("main");
const nav = document.getElementById("nav");
nav.setAttribute("aria-label", t("frame.views"));
const banner = document.getElementById("banner");
let current = null; // {view, stop}

// #/ | #/new | #/sweeps | #/compare?run=a&run=b | #/run/ID/VIEW?name=value
export function parse(hash) {
  const [place, search = ""] = hash.replace(/^#/, "").split("?", 2);
  const parts = place.split("/").filter(Boolean).map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return "";
    }
  });
  const values = new URLSearchParams(search);
  if (Object.hasOwn(ALL_RUNS, parts[0])) return { name: parts[0], run: null, values };
  if (parts[0] === "run" && parts[1]) return { name: VIEWS[parts[2]] ? parts[2] : "overview", run: parts[1], values };
  return { name: "runs", run: null, values };
}

const OF_ANY = ["overview", "settings", "logs"]; // views that a script, and a training on given answers, have too
const kinds = new Map(); // by run

async function drawNavigation({ name, run }) {
  const link = (href, text, isHere) => el("a", { href, "aria-current": isHere ? "page" : null }, text);
  const links = [link("#/", t("nav.runs"), name in ALL_RUNS)];
  if (run) {
    links.push(el("span", { class: "run" }, run));
    for (const [one, [, label]] of Object.entries(VIEWS)) {
      if (label && (OF_ANY.includes(one) || [undefined, "train"].includes(kinds.get(run)))) links.push(link(`#/run/${encodeURIComponent(run)}/${one}`, t(label), one === name || (name === "group" && one === "trajectories")));
    }
  }
  replace(nav, links);
  document.title = run ? `${shown(run)} – Penstock` : "Penstock";
  if (!run || kinds.has(run)) return;
  kinds.set(run, (await get(path("runs", run, "summary")).catch(() => ({}))).kind);
  if (parse(location.hash).run === run) drawNavigation(parse(location.hash));
}

async function show() {
  const place = parse(location.hash);
  if (current) current.stop();
  drawNavigation(place);
  const view = ALL_RUNS[place.name] || VIEWS[place.name][0];
  const holder = el("div", { data: { view: place.name } });
  replace(main, holder);
  let stopped = false;
  let timer = null;
  let failures = 0;
  const shownView = view.open(holder, place);
  current = {
    stop() {
      stopped = true;
      clearTimeout(timer);
      if (shownView.close) shownView.close();
    },
  };
  const refresh = async () => {
    clearTimeout(timer);
    if (stopped) return;
    if (!document.hidden || !holder.dataset.ready) {
      try {
        await shownView.refresh();
        if (stopped) return;
        failures = 0;
        holder.dataset.ready = "yes";
        say("");
      } catch (error) {
        if (stopped) return;
        failures += 1;
        if (error instanceof Refused && error.status === 401) {
          askForToken(holder);
          return;
        }
        say(error instanceof Refused ? error.message : t("frame.no-answer", { time: clock(Date.now() / 1000) }));
        if (error instanceof Refused && error.status < 500 && !holder.hasChildNodes()) replace(holder, el("p", {}, error.message));
        if (!(error instanceof Refused) && !(error instanceof TypeError) && error.name !== "TimeoutError" && error.name !== "AbortError") console.error(error);
      }
    }
    const period = shownView.periodMs === undefined ? PERIOD_MS : shownView.periodMs;
    if (failures) timer = setTimeout(refresh, Math.min(PERIOD_MS * 2 ** Math.min(failures - 1, 4), MOST_MS));
    else if (period) timer = setTimeout(refresh, period);
  };
  current.refresh = refresh;
  await refresh();
}

function say(text) {
  banner.hidden = !text;
  if (banner.textContent !== shown(text)) banner.textContent = shown(text);
}

// The form is sent to the console itself, which answers with a cookie for this browser.
function askForToken(holder) {
  const search = new URLSearchParams(location.search);
  const why = search.has("refused") ? t("token.unknown") : search.has("expired") ? t("token.expired") : "";
  const field = el("input", { type: "password", name: "token", autocomplete: "off", maxlength: "200" });
  const form = el("form", {}, el("h1", {}, t("token.title")), why ? el("p", { class: "warn" }, why) : null,
    el("p", {}, t("token.how")),
    el("label", {}, t("token.field"), field), " ", el("button", { type: "submit" }, t("token.use")));
  form.method = "post";
  form.action = "/login";
  say("");
  holder.dataset.ready = "token";
  replace(holder, form);
  field.focus();
}

document.documentElement.lang = t("frame.lang");
for (const one of document.querySelectorAll("[data-text]")) one.textContent = t(one.dataset.text);
document.getElementById("theme").title = t("frame.theme-title");
document.getElementById("language").addEventListener("click", switchLanguage);
document.getElementById("language").lang = t("frame.other-lang");

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  try {
    localStorage.setItem("penstock-theme", root.dataset.theme);
  } catch {
    // storage is switched off
  }
  document.dispatchEvent(new Event("themechange"));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.dispatchEvent(new Event("themechange")));
document.addEventListener("visibilitychange", () => { if (!document.hidden && current) current.refresh(); });
window.addEventListener("online", () => { if (current) current.refresh(); });
window.addEventListener("hashchange", () => { show(); main.focus(); });
show();
