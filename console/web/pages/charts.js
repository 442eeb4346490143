// Line charts with uPlot: the mean of each bucket as a line, the least and greatest value as a band around it.

import { el, number, shown, svg } from "./dom.js";

const COLOURS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6"];

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
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
    this.holder = el("div", { class: "chart", role: "img", "aria-label": title });
    this.element = el("section", { class: "panel", "aria-label": title, data: { chart: title } },
      el("h2", {}, title), note ? el("p", { class: "dim" }, note) : null, this.last, this.holder, this.sentence);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.holder);
    this.themed = () => this.draw(true);
    document.addEventListener("themechange", this.themed);
  }

  // lines: [{label, steps, mean, min, max}]
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
    const steps = [...new Set(this.lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
    const columns = this.lines.flatMap((line) => {
      const place = new Map(line.steps.map((step, at) => [step, at]));
      return ["mean", "min", "max"].map((kind) => steps.map((step) => {
        const at = place.get(step);
        return at === undefined ? null : (line[kind] || line.mean)[at];
      }));
    });
    return [steps, ...columns];
  }

  draw(fresh) {
    if (!this.lines.length || !this.lines.some((line) => line.steps.length)) return;
    if (this.plot && !fresh) {
      this.plot.setData(this.data());
      return;
    }
    if (this.plot) this.plot.destroy();
    const axis = { stroke: css("--dim"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const series = [{}];
    const bands = [];
    this.lines.forEach((line, at) => {
      const colour = css(COLOURS[at % COLOURS.length]);
      const first = series.length;
      series.push({ label: line.label, stroke: colour, width: 1.6, spanGaps: true, points: { show: line.steps.length < 3 } });
      series.push({ stroke: "transparent", width: 0, spanGaps: true, points: { show: false } });
      series.push({ stroke: "transparent", width: 0, spanGaps: true, points: { show: false } });
      bands.push({ series: [first + 2, first + 1], fill: at === 0 ? css("--band") : "transparent" });
    });
    const range = this.zero ? (u, low, high) => [Math.min(0, low ?? 0), (high ?? 1) > 0 ? high * 1.05 : 1] : undefined;
    this.plot = new window.uPlot({
      width: Math.max(this.holder.clientWidth, 120), height: this.height, series, bands,
      scales: { x: { time: false }, y: range ? { range } : {} },
      axes: [{ ...axis, size: 28 }, { ...axis, size: 52, values: (u, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick))) }],
      legend: { show: false }, cursor: { y: false, drag: { x: true, y: false } },
      hooks: { setCursor: [(u) => this.pointed(u.cursor.idx)] },
    }, this.data(), this.holder);
  }

  pointed(at) {
    if (at === null || at === undefined || !this.plot) return;
    const step = this.plot.data[0][at];
    this.last.replaceChildren(...this.lines.map((line, n) =>
      el("span", { class: `key k${n % COLOURS.length}`, data: { line: line.label } }, `${line.label} at ${step}: ${number(this.plot.data[1 + 3 * n][at])}`)));
  }

  resize() {
    if (this.plot && this.holder.clientWidth > 0 && Math.abs(this.plot.width - this.holder.clientWidth) > 1) {
      this.plot.setSize({ width: this.holder.clientWidth, height: this.height });
    }
  }

  destroy() {
    this.observer.disconnect();
    document.removeEventListener("themechange", this.themed);
    if (this.plot) this.plot.destroy();
  }
}

function short(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return `${+(value / 1e9).toPrecision(3)}G`;
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  return size !== 0 && size < 1e-3 ? value.toExponential(0) : String(+value.toPrecision(4));
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
      svgTitle(`${edges.length > counts.length ? `${number(edges[at])} to ${number(edges[at + 1])}` : number(edges[at])}: ${count}`)));
  const ends = counts.length ? `${number(edges[0])} to ${number(edges.at(-1))}` : "no values";
  return el("div", {}, svg("svg", { class: "bars", viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img", "aria-label": shown(`${label}: ${ends}`) }, ...drawn),
    el("div", { class: "dim" }, ends));
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
  return svg("svg", { class: "spark", viewBox: "0 0 100 28", preserveAspectRatio: "none", role: "img", "aria-label": `reward from ${number(known[0])} to ${number(known.at(-1))}` }, svg("path", { d: path }));
}
