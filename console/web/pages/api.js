// Calls the console's API. The browser sends its cookie, which no script can read; the API refuses what comes from another site.

import { t } from "./language.js";

const DEADLINE_MS = 30000;

export class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

export function path(...parts) {
  return "/v1/" + parts.map((part) => encodeURIComponent(String(part))).join("/");
}

export function query(values) {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    if (value === null || value === undefined || value === "") continue;
    for (const one of Array.isArray(value) ? value : [value]) found.append(name, String(one));
  }
  const text = found.toString();
  return text ? `?${text}` : "";
}

async function call(method, url, body) {
  const headers = { Accept: "application/json" };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(url, {
    method, headers, body: body === undefined ? undefined : JSON.stringify(body), cache: "no-store", credentials: "same-origin",
    redirect: "error", signal: AbortSignal.timeout(DEADLINE_MS),
  });
  let found = null;
  if (answer.status === 204) return found;
  try {
    found = await answer.json();
  } catch {
    throw new Refused(answer.status, t("frame.not-json", { url }));
  }
  if (!answer.ok) {
    throw new Refused(answer.status, [found.detail, found.fix].filter(Boolean).join("; ") || answer.statusText);
  }
  return found;
}

export const get = (url) => call("GET", url);
export const post = (url, body = {}) => call("POST", url, body);
export const put = (url, body) => call("PUT", url, body);
export const remove = (url) => call("DELETE", url);
