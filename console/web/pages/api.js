// Calls the console's API. The token is kept for this tab only, and sent in a header: no cookie, so no other site can use it.

const KEY = "penstock-token";
const DEADLINE_MS = 30000;

export class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

let token = "";
try {
  token = sessionStorage.getItem(KEY) || "";
} catch {
  // storage is switched off: the token is asked for again after a reload
}

export function setToken(value) {
  token = value.trim();
  try {
    sessionStorage.setItem(KEY, token);
  } catch {
    // as above
  }
}

// A printed URL may carry the token behind the #, which no server and no log sees; it is taken out of the address at once.
export function takeTokenFromAddress() {
  const found = /^#token=([^&]+)(?:&(.*))?$/.exec(location.hash);
  if (!found) return;
  setToken(decodeURIComponent(found[1]));
  history.replaceState(null, "", `${location.pathname}#${found[2] || "/"}`);
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
  if (token) headers.Authorization = `Bearer ${token}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(url, {
    method, headers, body: body === undefined ? undefined : JSON.stringify(body), cache: "no-store", credentials: "omit",
    redirect: "error", signal: AbortSignal.timeout(DEADLINE_MS),
  });
  let found = null;
  try {
    found = await answer.json();
  } catch {
    throw new Refused(answer.status, `the answer to ${url} is not JSON`);
  }
  if (!answer.ok) {
    const detail = found && (found.detail || found.error);
    throw new Refused(answer.status, typeof detail === "string" ? detail : JSON.stringify(detail || found));
  }
  return found;
}

export const get = (url) => call("GET", url);
export const post = (url, body = {}) => call("POST", url, body);
