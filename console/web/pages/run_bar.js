// What can be done with a run, by whoever may: start, pause, stop, evaluate, export, copy and delete it; its tasks, tags and notes.

import { get, path, post, put, remove } from "./api.js";
import { el, replace, replaceIfChanged } from "./dom.js";
import { said as translated, t } from "./language.js";

const MAY = { start: ["created", "stopped", "paused", "failed"], pause: ["queued", "running"], stop: ["queued", "waiting", "running", "pausing"] };
const LABELS = { start: t("bar.start"), pause: t("bar.pause"), stop: t("bar.stop") };
export const canChange = (role) => role === "run" || role === "admin";
let caller = null;

export async function role() {
  caller = caller || (await get("/v1/caller"));
  return caller.role;
}

export function runBar(run) {
  const element = el("div");
  const form = el("div");
  const said = el("p", { role: "status", "aria-live": "polite" });
  const at = (...more) => path("runs", run, ...more);

  async function act(what, call) {
    try {
      await call();
      replace(said, what);
    } catch (error) {
      replace(said, el("span", { class: "bad" }, error.message));
    }
    await refresh();
  }

  const button = (label, click, kind = "") => el("button", { type: "button", class: kind, on: { click } }, label);
  const ask = (fields, label, send, done = t("bar.asked", { what: label })) => {
    const inputs = Object.fromEntries(fields.map(([name, text, value]) => [name, el("input", { name, value, class: "wide", required: name === "data" ? "required" : null })]));
    const asked = el("form", { class: "filters", on: { submit: (event) => {
      event.preventDefault();
      replace(form);
      act(done, () => send(Object.fromEntries(Object.entries(inputs).map(([name, input]) => [name, input.value.trim()]))));
    } } }, fields.map(([name, text]) => el("label", {}, text, inputs[name])), el("button", { type: "submit" }, label), button(t("bar.cancel"), () => replace(form)));
    replace(form, asked);
    asked.elements[0].focus();
  };

  let kind = "";

  // The held-out files of the run itself, which an evaluation is asked for with.
  async function heldOut() {
    const config = await get(at("config")).catch(() => null); // a run that somebody else sent
    return [config?.settings?.data?.eval ?? []].flat().join(", ");
  }

  function buttons(status, mine) {
    if (!canChange(mine)) return [];
    const shown = status.launcher ? Object.keys(MAY).filter((verb) => MAY[verb].includes(status.state)) : [];
    const label = (verb) => (verb === "start" && status.started_at ? t("bar.resume") : LABELS[verb]);
    return [
      ...shown.map((verb) => button(label(verb), () => act(t("bar.asked", { what: label(verb) }), () => post(at(verb))))),
      ...(kind !== "train" ? [] : [button(t("bar.evaluate"), async () => ask([["version", t("field.version"), "best"], ["data", t("field.data"), await heldOut()], ["samples", t("field.samples"), "1"]], t("bar.evaluate"),
        (values) => post(at("tasks"), { task: "evaluate", version: values.version, data: values.data.split(",").map((file) => file.trim()).filter(Boolean), samples: Number(values.samples) }))),
      button(t("bar.export"), () => ask([["version", t("field.version"), "best"], ["to", t("field.to"), `models/${run}`]], t("bar.export"), (values) => post(at("tasks"), { task: "export", ...values })))]),
      el("a", { href: `#/new?copy=${encodeURIComponent(run)}` }, t("bar.copy")),
      button(t("bar.notes"), () => ask([["tags", t("field.tags"), status.tags.join(", ")], ["notes", t("field.notes"), status.notes]], t("bar.keep"),
        (values) => put(at("notes"), { tags: values.tags.split(",").map((tag) => tag.trim()).filter(Boolean), notes: values.notes }), t("bar.saved"))),
      mine === "admin" ? button(t("bar.delete"), () => ask([["name", t("bar.type-name", { run }), ""]], t("bar.delete"), async (values) => {
        if (values.name !== run) throw new Error(t("bar.wrong-name"));
        await remove(at());
        location.hash = "#/";
      }), "danger") : null,
    ];
  }

  async function refresh(ofKind = kind) {
    kind = ofKind;
    const mine = await role();
    const status = await get(at()).catch(() => null); // a run of NATS alone has no folder here
    replaceIfChanged(element.firstChild, [status, mine, kind], () => (status ? [
      el("div", { class: "bar" }, buttons(status, mine), status.tags.map((tag) => el("span", { class: "dim" }, `#${tag}`))),
      status.notes ? el("p", {}, status.notes) : null,
      ["failed", "queued", "stopped"].includes(status.state) && status.detail ? el("p", { class: status.state === "failed" ? "bad" : "dim" }, translated(status.detail)) : null,
      status.log ? el("details", { open: status.state === "failed" }, el("summary", {}, t("bar.log-end")), el("pre", { class: "text" }, status.log)) : null,
      status.tasks.map((task) => el("p", { class: "dim" }, `${translated(task.task)}: ${task.running || task.exit_code === undefined ? t("task.running") : task.exit_code === null ? t("task.stopped") : task.exit_code === 0 ? t("task.done") : t("task.code", { code: task.exit_code })} `,
        el("a", { href: `#/run/${encodeURIComponent(run)}/logs?log=${task.task}` }, t("bar.log")))),
    ] : null));
  }

  element.append(el("div"), form, said);
  return { element, refresh };
}
