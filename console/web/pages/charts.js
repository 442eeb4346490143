// Line charts with uPlot: the mean of each bucket as a line, the least and greatest value as a band around it. A drag zooms, a double click ends it.

import { el, number, shown, svg } from "./dom.js";
import { t } from "./language.js";

const COLOURS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6"];
const X = { step: t("axis.step"), tokens: t("axis.tokens"), time: t("axis.time") };
const KEPT = "penstock-charts";

// How every chart is drawn; this browser keeps it.
export const modes = { x: "step", smooth: 0, log: false, figures: {}, ...kept() };

function kept() {
  try {
    return JSON.parse(localStorage.getItem(KEPT)) || {};
  } catch {
    return {};
  }
}

export function change(values) {
  Object.assign(modes, values);
  try {
    localStorage.setItem(KEPT, JSON.stringify(modes));
  } catch {
    // storage is switched off
  }
  document.dispatchEvent(new Event("themechange"));
}

// The controls of all charts, and a picker of further figures, kept for each kind of run.
export function toolbar(kind, onPick) {
  const select = el("select", { on: { change: () => change({ x: select.value }) } },
    Object.entries(X).map(([name, text]) => el("option", { value: name, selected: modes.x === name }, text)));
  const smooth = el("input", { type: "range", min: "0", max: "0.98", step: "0.02", value: String(modes.smooth), on: { input: () => change({ smooth: Number(smooth.value) }) } });
  const log = el("input", { type: "checkbox", checked: modes.log, on: { change: () => change({ log: log.checked }) } });
  const list = el("div", { class: "figures" });
  const toggle = (name) => (event) => {
    const others = picked(kind).filter((one) => one !== name);
    change({ figures: { ...modes.figures, [kind]: event.target.checked ? [...others, name] : others } });
    onPick();
  };
  let known = "";
  const element = el("form", { class: "filters charts", on: { submit: (event) => event.preventDefault() } },
    el("label", {}, t("chart.x"), select), el("label", {}, t("chart.smoothing"), smooth), el("label", { class: "row" }, log, t("chart.log")),
    el("details", {}, el("summary", {}, t("chart.figures")), list));
  return { element, names(names) {
    if (known === names.join()) return;
    known = names.join();
    list.replaceChildren(...names.map((name) => el("label", { class: "row" }, el("input", { type: "checkbox", checked: picked(kind).includes(name), on: { change: toggle(name) } }), name)));
  } };
}

export const picked = (kind) => modes.figures[kind] || [];

// Steps, hours and tokens of the buckets of `metrics`, for each of its lines.
export function axes(found) {
  const trained = found.figures.tokens_trained;
  let sum = 0;
  return { steps: found.steps, at: found.at, tokens: trained && trained.mean.map((value) => (sum += (value || 0) * found.bucket)) };
}

function xOf(line) {
  if (modes.x === "tokens" && line.tokens) return line.tokens;
  return modes.x === "time" && line.at ? line.at.map((at) => (at - line.at[0]) / 3600) : line.steps;
}

// An exponential mean, corrected for its beginning.
function smoothed(values) {
  let sum = 0;
  let weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = modes.smooth * sum + (1 - modes.smooth) * value;
    weight = modes.smooth * weight + (1 - modes.smooth);
    return sum / weight;
  });
}

const asHours = (hours) => (Math.abs(hours) < 1 ? t("unit.minutes", { n: number(60 * hours, 1) }) : t("unit.hours", { n: number(hours, 2) }));

function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name.replace(/[^\w.-]+/g, "-");
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

export class LineChart {
  // lines: [{label, figure}] of one source, or several sources with the same figure.
  constructor(title, { note = "", height = 190, zero = false } = {}) {
    this.title = title;
    this.height = height;
    this.zero = zero;
    this.lines = [];
    this.plot = null;
    this.last = el("span", { class: "keys" });
    this.sentence = el("p", { class: "sentence", hidden: true });
    this.tip = el("div", { class: "tip", hidden: true });
    this.holder = el("div", { class: "chart", role: "img", "aria-label": title });
    const button = (text, label, act) => el("button", { type: "button", title: label, "aria-label": `${text} ${label}: ${title}`, on: { click: act } }, text);
    this.element = el("section", { class: "panel", "aria-label": title, data: { chart: title } },
      el("div", { class: "tools" }, button(t("chart.csv"), t("chart.save-csv"), () => this.saveCsv()), button(t("chart.png"), t("chart.save-png"), () => this.savePng()),
        button("⤢", t("chart.full"), () => (document.fullscreenElement ? document.exitFullscreen() : this.element.requestFullscreen()))),
      el("h2", {}, title), note ? el("p", { class: "dim" }, note) : null, this.last, this.holder, this.sentence);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.holder);
    this.themed = () => this.draw(true);
    document.addEventListener("themechange", this.themed);
  }

  // lines: [{label, steps, mean, min, max}], and at and tokens where they are known; low and high where the band is another
  set(lines, sentence = "") {
    this.sentence.hidden = !sentence;
    this.sentence.textContent = shown(sentence);
    const key = JSON.stringify(lines.map((line) => [line.label, line.steps.length, line.steps.at(-1), line.mean.at(-1), line.steps[0]]));
    if (key === this.key) return;
    this.key = key;
    const sameShape = this.lines.length === lines.length && this.lines.every((line, at) => line.label === lines[at].label);
    this.lines = lines;
    this.draw(!sameShape);
    const ends = lines.map((line) => [line.label, lastKnown(line.mean)]);
    this.last.replaceChildren(...ends.map(([label, value], at) =>
      el("span", { class: `key k${at % COLOURS.length}`, data: { last: value === null ? "" : String(value), line: label } }, `${label}: ${number(value)}`)));
    this.holder.setAttribute("aria-label", shown(`${this.title}: ` + ends.map(([label, value]) => `${label} ${number(value)}`).join(", ")));
  }

  data() {
    const xs = this.lines.map(xOf);
    const all = [...new Set(xs.flat())].sort((a, b) => a - b);
    const columns = this.lines.flatMap((line, n) => {
      const place = new Map(xs[n].map((x, at) => [x, at]));
      const mean = modes.smooth ? smoothed(line.mean) : line.mean;
      return [mean, line.low || line.min || mean, line.high || line.max || mean].map((values) => all.map((x) => {
        const at = place.get(x);
        return at === undefined || (modes.log && values[at] <= 0) ? null : values[at];
      }));
    });
    return [all, ...columns];
  }

  draw(fresh) {
    if (!this.lines.length || !this.lines.some((line) => line.steps.length)) return;
    if (this.plot && !fresh) {
      const { min, max } = this.plot.scales.x;
      const [old] = this.plot.data;
      const isZoomed = min > old[0] || max < old.at(-1);
      this.plot.setData(this.data(), !isZoomed);
      if (isZoomed) this.plot.redraw();
      return;
    }
    if (this.plot) this.plot.destroy();
    const axis = { stroke: css("--dim"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const series = [{}];
    const bands = [];
    this.lines.forEach((line, at) => {
      const colour = css(COLOURS[at % COLOURS.length]);
      const first = series.length;
      series.push({ label: line.label, stroke: colour, width: 1.6, dash: at < COLOURS.length ? [] : [6, 3], spanGaps: true, points: { show: line.mean.filter((value) => value !== null).length < 3 } });
      series.push({ stroke: "transparent", width: 0, spanGaps: true, points: { show: false } });
      series.push({ stroke: "transparent", width: 0, spanGaps: true, points: { show: false } });
      bands.push({ series: [first + 2, first + 1], fill: at === 0 ? css("--band") : "transparent" });
    });
    const range = this.zero ? (u, low, high) => [Math.min(0, low ?? 0), (high ?? 1) > 0 ? high * 1.05 : 1] : undefined;
    const y = modes.log ? { distr: 3 } : range ? { range } : {};
    const xValues = modes.x === "time" ? { values: (u, ticks) => ticks.map(asHours) } : { values: (u, ticks) => ticks.map((tick) => short(tick)) };
    this.plot = new window.uPlot({
      width: Math.max(this.holder.clientWidth, 120), height: this.tall(), series, bands, scales: { x: { time: false }, y },
      axes: [{ ...axis, size: 28, ...xValues }, { ...axis, size: 52, values: (u, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick))) }],
      legend: { show: false }, cursor: { y: false, drag: { x: true, y: false }, sync: { key: "page" } },
      hooks: { setCursor: [(u) => this.pointed(u)] },
    }, this.data(), this.holder);
    this.plot.over.append(this.tip);
  }

  tall() {
    return document.fullscreenElement === this.element ? window.innerHeight - 140 : this.height;
  }

  pointed(u) {
    const { idx, left } = u.cursor;
    this.tip.hidden = idx === null || idx === undefined || left < 0;
    if (this.tip.hidden) return;
    const x = u.data[0][idx];
    const values = this.lines.map((line, n) => el("div", { class: `k${n % COLOURS.length}` }, `${line.label}: ${number(u.data[1 + 3 * n][idx])}`));
    this.tip.replaceChildren(el("div", {}, modes.x === "time" ? asHours(x) : `${modes.x === "tokens" && this.lines[0].tokens ? X.tokens : X.step} ${number(x)}`), ...values);
    this.tip.classList.toggle("left", left > u.over.clientWidth / 2);
    this.tip.style.setProperty("--x", `${left}px`);
  }

  saveCsv() {
    const rows = this.lines.flatMap((line) => line.steps.map((step, at) => [line.label, step, line.at ? line.at[at] : "", line.mean[at], line.min[at], line.max[at]]));
    const text = [["line", "step", "at", "mean", "min", "max"], ...rows].map((row) => row.map((one) => (typeof one === "string" ? `"${one.replaceAll('"', '""')}"` : one ?? "")).join(",")).join("\n");
    save(new Blob([`${text}\n`], { type: "text/csv" }), `${this.title}.csv`);
  }

  savePng() {
    if (!this.plot) return;
    const from = this.plot.ctx.canvas;
    const to = Object.assign(document.createElement("canvas"), { width: from.width, height: from.height });
    const drawing = to.getContext("2d");
    drawing.fillStyle = css("--panel");
    drawing.fillRect(0, 0, to.width, to.height);
    drawing.drawImage(from, 0, 0);
    to.toBlob((blob) => save(blob, `${this.title}.png`));
  }

  resize() {
    const [width, height] = [this.holder.clientWidth, this.tall()];
    if (this.plot && width > 0 && (Math.abs(this.plot.width - width) > 1 || this.plot.height !== height)) this.plot.setSize({ width, height });
  }

  destroy() {
    this.observer.disconnect();
    document.removeEventListener("themechange", this.themed);
    if (this.plot) this.plot.destroy();
  }
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function short(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return `${+(value / 1e9).toPrecision(3)}G`;
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  return size !== 0 && size < 1e-3 ? String(+value.toPrecision(2)) : String(+value.toPrecision(4));
}

function lastKnown(values) {
  for (let at = values.length - 1; at >= 0; at -= 1) if (values[at] !== null) return values[at];
  return null;
}

// Bars of a histogram: {edges, counts}, with as many edges as bars (values) or one more (intervals).
export function bars(label, found) {
  const { edges, counts } = found;
  const most = Math.max(1, ...counts);
  const width = 100 / Math.max(counts.length, 1);
  const drawn = counts.map((count, at) =>
    svg("rect", { x: at * width + width * 0.08, y: 100 - (96 * count) / most, width: width * 0.84, height: (96 * count) / most },
      svgTitle(`${edges.length > counts.length ? t("chart.to", { low: number(edges[at]), high: number(edges[at + 1]) }) : number(edges[at])}: ${count}`)));
  const ends = counts.length ? t("chart.to", { low: number(edges[0]), high: number(edges.at(-1)) }) : t("chart.no-values");
  return el("div", {}, svg("svg", { class: "bars", viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img", "aria-label": shown(`${label}: ${ends}`) }, ...drawn),
    el("div", { class: "dim" }, ends));
}

// Points of {x, y, name, isBest}; numbers that span more than a decade have a logarithmic axis, texts are in order.
export function scatter(label, points) {
  const names = [...new Set(points.map((one) => one.x))].sort((a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b))));
  const areNumbers = names.every((x) => typeof x === "number");
  const isLog = areNumbers && names[0] > 0 && names.at(-1) > 10 * names[0];
  const at = (x) => (areNumbers ? (isLog ? Math.log(x) : x) : names.indexOf(x));
  const scaled = (value, low, high) => (high > low ? (value - low) / (high - low) : 0.5);
  const ys = points.map((one) => one.y);
  const [low, high] = [Math.min(...ys), Math.max(...ys)];
  const drawn = points.map((one) => svg("circle", { cx: 6 + 288 * scaled(at(one.x), at(names[0]), at(names.at(-1))), cy: 104 - 98 * scaled(one.y, low, high), r: one.isBest ? 5 : 3.5, class: one.isBest ? "best" : "" },
    svgTitle(t("sweep.point", { name: one.name, x: one.x, y: number(one.y) }))));
  const to = (one, other) => t("chart.to", { low: one, high: other });
  const ends = points.length ? `${to(names[0], names.at(-1))}; ${to(number(low), number(high))}` : t("chart.no-values");
  return el("div", {}, el("div", { class: "dim" }, label), svg("svg", { class: "scatter", viewBox: "0 0 300 110", role: "img", "aria-label": shown(`${label}: ${ends}`) }, ...drawn), el("div", { class: "dim" }, ends));
}

function svgTitle(text) {
  const title = svg("title", {});
  title.textContent = shown(text);
  return title;
}

export function sparkline(values) {
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return el("span", { class: "dim" }, "–");
  const low = Math.min(...known);
  const span = Math.max(...known) - low || 1;
  const path = values.map((value, at) => (value === null ? "" : `${at === 0 ? "M" : "L"}${((at * 100) / (values.length - 1)).toFixed(2)} ${(26 - (24 * (value - low)) / span).toFixed(2)}`)).join(" ").replace(/^ *L/, "M");
  return svg("svg", { class: "spark", viewBox: "0 0 100 28", preserveAspectRatio: "none", role: "img", "aria-label": t("chart.sparkline", { first: number(known[0]), last: number(known.at(-1)) }) }, svg("path", { d: path }));
}
