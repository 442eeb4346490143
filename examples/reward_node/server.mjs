// A reward endpoint in plain Node (18 or newer), no package needed: it registers itself, renews its lease, checks
// signatures, and unregisters at the end.
//
//   node examples/reward_node/server.mjs http://127.0.0.1:8700
//   penstock reward test balanced
//   penstock train run.toml reward.name=balanced
//
// REWARD_TOKEN is the reward service's token, if it wants one; REWARD_SECRET (whsec_...) has requests signed.

import { createHmac, timingSafeEqual } from "node:crypto";
import { createServer } from "node:http";

const NAME = "balanced";
const VERSION = "1";
const LEASE_S = 15;
const TOLERANCE_S = 300;
const MAX_BYTES = 64 * 1024 * 1024;
const service = (process.argv[2] ?? "http://127.0.0.1:8700").replace(/\/$/, "");
const token = process.env.REWARD_TOKEN ?? "";
const secrets = (process.env.REWARD_SECRET ?? "").split(/\s+/).filter(Boolean);

/** The reward: how much of the text's brackets match. Throw when something cannot be judged; never return 0 for it. */
function score(group, text) {
  const closes = { ")": "(", "]": "[", "}": "{" };
  const open = [];
  let brackets = 0;
  let matched = 0;
  for (const letter of text) {
    if ("([{".includes(letter)) open.push(letter);
    else if (!(letter in closes)) continue;
    else if (open.at(-1) === closes[letter]) {
      open.pop();
      matched += 2;
    }
    brackets += 1;
  }
  if (brackets === 0) throw new Error("no brackets in it");
  return { score: matched / brackets, parts: { brackets } };
}

function scoreOrError(group, text) {
  try {
    return score(group, text);
  } catch (err) {
    return { score: null, error: String(err.message) };
  }
}

/** Standard Webhooks: v1,base64(HMAC-SHA256(key, "id.timestamp.body")), one for every key, separated by spaces. */
function isSigned(headers, body) {
  const id = headers["webhook-id"];
  const timestamp = headers["webhook-timestamp"];
  if (!id || !/^\d+$/.test(timestamp ?? "")) return false;
  if (Math.abs(Date.now() / 1000 - Number(timestamp)) > TOLERANCE_S) return false;
  const given = (headers["webhook-signature"] ?? "").split(" ").map((one) => Buffer.from(one));
  return secrets.some((secret) => {
    const key = Buffer.from(secret.replace(/^whsec_/, ""), "base64");
    const digest = createHmac("sha256", key).update(`${id}.${timestamp}.`).update(body).digest("base64");
    const right = Buffer.from(`v1,${digest}`);
    return given.some((one) => one.length === right.length && timingSafeEqual(one, right));
  });
}

async function read(request) {
  const chunks = [];
  let size = 0;
  for await (const chunk of request) {
    size += chunk.length;
    if (size > MAX_BYTES) throw new Error("the body is too long");
    chunks.push(chunk);
  }
  return Buffer.concat(chunks);
}

async function answer(request) {
  if (request.method === "GET" && request.url === "/healthz") return [200, { ok: true }];
  if (request.method !== "POST") return [405, { detail: "POST groups here" }];
  const body = await read(request);
  if (secrets.length && !isSigned(request.headers, body)) return [401, { detail: "the signature is missing or wrong" }];
  let wanted;
  try {
    wanted = JSON.parse(body.toString("utf8"));
    if (!Array.isArray(wanted.groups)) throw new Error("no groups in it");
  } catch (err) {
    return [422, { detail: `not a request for scores: ${err.message}` }];
  }
  const results = wanted.groups.map((group) => ({
    group_id: group.group_id,
    scores: group.completions.map((text) => scoreOrError(group, text)),
  }));
  return [200, { results }];
}

const server = createServer(async (request, response) => {
  const [status, body] = await answer(request).catch((err) => [500, { detail: String(err.message) }]);
  response.writeHead(status, { "content-type": "application/json" }).end(JSON.stringify(body));
});

function call(method, path, body) {
  const headers = { "content-type": "application/json", ...(token && { authorization: `Bearer ${token}` }) };
  const signal = AbortSignal.timeout(5000);
  return fetch(service + path, { method, headers, body: body && JSON.stringify(body), signal });
}

server.listen(0, "127.0.0.1", async () => {
  const url = `http://127.0.0.1:${server.address().port}/score`;
  const offer = { name: NAME, version: VERSION, url, lease_s: LEASE_S, replace: true, returns_parts: ["brackets"], secrets };
  const register = async () => {
    const answered = await call("POST", "/v1/endpoints", offer);
    if (!answered.ok) throw new Error(`refused: HTTP ${answered.status}: ${await answered.text()}`);
  };
  const renew = async () => {
    const answered = await call("POST", `/v1/endpoints/${NAME}/lease`, { version: VERSION, url });
    if (answered.status === 404) await register(); // the service has forgotten us
    if (answered.status === 409) await stop(`${NAME} was taken over: ${await answered.text()}`);
  };
  const stop = async (why) => {
    console.log(why);
    clearInterval(renewing);
    await call("DELETE", `/v1/endpoints/${NAME}?url=${encodeURIComponent(url)}`).catch(() => {});
    server.close(() => process.exit(0)); // calls under way end first
    server.closeIdleConnections();
  };
  try {
    await register();
  } catch (err) {
    console.error(`${NAME} could not be registered at ${service}: ${err.message}`);
    process.exit(1);
  }
  console.log(`${NAME} serves at ${url}, registered at ${service}; press Ctrl-C to stop`);
  const renewing = setInterval(() => renew().catch((err) => console.error(`lease: ${err.message}`)), (LEASE_S / 3) * 1000);
  process.once("SIGINT", () => stop("stopping"));
  process.once("SIGTERM", () => stop("stopping"));
});
