// Builds elements. Every text becomes a text node: nothing that comes from a run is ever parsed as HTML.

import { locale, t } from "./language.js";

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

// Show characters that are invisible, or that would reorder the text around them, as their escapes.
export function shown(text) {
  return String(text).replace(HIDDEN, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

const ATTRIBUTES = new Set([
  "class", "id", "href", "type", "name", "value", "title", "for", "role", "placeholder", "min", "max", "step", "scope",
  "aria-label", "aria-current", "aria-live", "rows", "colspan", "tabindex", "inputmode", "autocomplete", "maxlength", "required",
]);

export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
    else if (name === "data") for (const [key, one] of Object.entries(value)) element.dataset[key] = one;
    else if (name === "checked" || name === "disabled" || name === "hidden" || name === "selected" || name === "open") element[name] = true;
    else if (!ATTRIBUTES.has(name)) throw new Error(`attribute ${name} is not used on this page`);
    else if (name === "href" && !/^(#|\/(?!\/))/.test(value)) throw new Error("links lead to this page only");
    else element.setAttribute(name, value);
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(shown(child)));
  }
}

export function replace(element, ...children) {
  element.replaceChildren();
  append(element, children);
}

const FOCUSABLE = "a, button, input, summary, .scroll";

// Replace the rows of a table, or other content, only when it changes; what was unfolded, scrolled or focused stays so.
export function replaceIfChanged(element, key, build) {
  const text = JSON.stringify(key);
  if (element.dataset.drawn === text) return;
  element.dataset.drawn = text;
  const inside = (selector) => [...element.querySelectorAll(selector)];
  const open = inside("details").map((one) => one.open);
  const scrolled = inside(".scroll").map((one) => one.scrollLeft);
  const focused = inside(FOCUSABLE).indexOf(document.activeElement);
  replace(element, build());
  inside("details").forEach((one, at) => { if (at in open) one.open = open[at]; });
  inside(".scroll").forEach((one, at) => { one.scrollLeft = scrolled[at] || 0; });
  if (focused >= 0) inside(FOCUSABLE)[focused]?.focus({ preventScroll: true });
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  element.append(...children);
  return element;
}

export function panel(title, ...children) {
  return el("section", { class: "panel" }, el("h2", {}, title), ...children);
}

// ── numbers ──

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size > 0 && size < 0.001) return value.toExponential(2);
  if (size >= 1e9) return `${fixed(value / 1e9, 2)}G`;
  return fixed(value, Number.isInteger(value) || size >= 1000 ? 0 : digits);
}

const fixed = (value, digits) => value.toLocaleString(locale, { minimumFractionDigits: digits, maximumFractionDigits: digits });


export function percent(value) {
  return value === null || value === undefined ? "–" : value.toLocaleString(locale, { style: "percent", minimumFractionDigits: 1, maximumFractionDigits: 1 });
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) { value /= 1000; at += 1; }
  return `${fixed(value, at && 1)} ${units[at]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return t("unit.ms", { n: fixed(1000 * value, 0) });
  if (value < 60) return t("unit.s", { n: fixed(value, 1) });
  if (value < 3600) return t("unit.min", { n: Math.floor(value / 60), s: Math.floor(value % 60) });
  if (value < 172800) return t("unit.h", { n: Math.floor(value / 3600), m: Math.floor((value % 3600) / 60) });
  return t("unit.days", { n: Math.floor(value / 86400) });
}

export function age(iso) {
  if (!iso) return "–";
  const then = typeof iso === "number" ? iso * 1000 : Date.parse(iso);
  const past = Math.max(0, (Date.now() - then) / 1000);
  const [unit, size] = UNITS.find(([, most]) => past >= most) || UNITS.at(-1);
  return Number.isNaN(then) ? "–" : ago.format(-Math.floor(past / size), unit);
}

const ago = new Intl.RelativeTimeFormat(locale);
const UNITS = [["day", 86400], ["hour", 3600], ["minute", 60], ["second", 1]];

export function clock(at) {
  if (at === null || at === undefined) return "–";
  const then = new Date(at * 1000);
  return then.toDateString() === new Date().toDateString() ? then.toLocaleTimeString(locale) : then.toLocaleString(locale);
}

// ── tables ──

const orders = new Map(); // of the tables that were sorted, by label: the heading, and 1 or -1

// Columns are [heading, cell(row), class, value(row)]; cells are texts or elements, a column with values can be sorted.
export function table(label, columns, rows, empty = t("table.none")) {
  const body = el("tbody");
  const heads = columns.map(([name, , kind, value]) => el("th", { scope: "col", class: kind || "" }, value ? el("button", { type: "button", class: "sort", on: { click: () => {
    orders.set(label, [name, orders.get(label)?.[0] === name ? -orders.get(label)[1] : 1]);
    draw();
  } } }, name) : name));
  function draw() {
    const [by, sign] = orders.get(label) || [];
    const value = columns.find(([name]) => name === by)?.[3];
    const known = (row) => (value(row) ?? null) !== null;
    const ordered = value ? [...rows].sort((a, b) => known(b) - known(a) || (known(a) ? sign * ((value(a) > value(b)) - (value(a) < value(b))) : 0)) : rows;
    heads.forEach((head, at) => columns[at][3] && head.setAttribute("aria-sort", columns[at][0] !== by ? "none" : sign > 0 ? "ascending" : "descending"));
    replace(body, ordered.length ? ordered.map((row) => el("tr", {}, columns.map(([, cell, kind]) => el("td", { class: kind || "" }, cell(row)))))
      : el("tr", {}, el("td", { colspan: columns.length, class: "dim" }, empty)));
  }
  draw();
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, el("table", {}, el("thead", {}, el("tr", {}, heads)), body));
}

export function tile(name, value, note = "", kind = "") {
  return el("div", { class: "tile", data: { tile: name } }, el("span", {}, name), el("b", { class: kind }, value), note ? el("span", {}, note) : null);
}

export function pairs(entries) {
  return el("dl", { class: "pairs" }, entries.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}
