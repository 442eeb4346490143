// An environment server in plain Node (18 or newer), no package needed: a number to find from "higher" and "lower".
//
//   node examples/environment_node/server.mjs 8800
//   penstock env test http://127.0.0.1:8800
//
// and in the run file:
//   [environment.define.guess]
//   type = "http"
//   options = { url = "http://127.0.0.1:8800", options = { highest = 20 } }
//
// ENVIRONMENT_SECRET (whsec_...) is the key that calls must be signed with; without one it listens on this machine only.

import { createHash, createHmac, timingSafeEqual } from "node:crypto";
import { createServer } from "node:http";

const NAME = "guess";
const VERSION = "1";
const CAPACITY = 256;
const IDLE_S = 900;
const TOLERANCE_S = 300;
const MAX_BYTES = 16 * 1024 * 1024;
const port = Number(process.argv[2] ?? 8800);
const secrets = (process.env.ENVIRONMENT_SECRET ?? "").split(/\s+/).filter(Boolean);
const episodes = new Map(); // by id: { startBody, started, game, step, stepBody, stepped, used }
let draining = false;

/** The environment. Everything random follows from the seed, so that an episode can be started again in the same world. */
class Guess {
  constructor(seed, row, options) {
    this.highest = options.highest ?? 100;
    if (!Number.isInteger(this.highest) || this.highest < 1) throw new Problem(422, "row_refused", "highest must be 1 or more");
    const digest = createHash("sha256").update(seed).digest();
    this.number = 1 + (digest.readUInt32BE(0) % this.highest);
    this.nearest = Infinity;
  }

  start() {
    const content = `Guess my number, from 1 to ${this.highest}.`;
    return { messages: [{ role: "user", content }], version: VERSION, scores: true };
  }

  step(message) {
    const text = (message.content ?? "").trim();
    if (!/^\d+$/.test(text)) return say("Write a number and nothing else.");
    const guess = Number(text);
    if (guess === this.number) return { done: true, reward: 1.0, parts: { success: 1.0 } };
    this.nearest = Math.min(this.nearest, Math.abs(guess - this.number));
    return say(guess < this.number ? "higher" : "lower");
  }

  /** What the last step gets besides, where the run's max_turns ended the episode: a near guess is worth something. */
  score() {
    return { reward: this.nearest === 1 ? 0.25 : 0.0 };
  }
}

function say(text) {
  return { messages: [{ role: "user", content: text }], done: false, reward: 0.0 };
}

class Problem extends Error {
  constructor(status, code, message) {
    super(message);
    Object.assign(this, { status, code });
  }
}

function start(body, text) {
  if (!/^[0-9a-f]{32}$/.test(body.id ?? "") || !/^\d{1,19}$/.test(body.seed ?? "")) {
    throw new Problem(400, "bad_request", "id must be 32 hex digits, and seed a number as text");
  }
  const held = episodes.get(body.id);
  if (held !== undefined) {
    if (held.startBody !== text) throw new Problem(409, "step_refused", "the episode was started with another body");
    return held.started; // the answer was lost: the same once more
  }
  if (draining) throw new Problem(503, "draining", "this server takes no new episodes");
  if (episodes.size >= CAPACITY) throw new Problem(503, "full", `${CAPACITY} episodes are played here`);
  if (body.version && body.version !== VERSION) throw new Problem(409, "wrong_version", `version ${VERSION} is played here`);
  const game = new Guess(body.seed, body.row, body.options ?? {});
  const started = game.start();
  episodes.set(body.id, { startBody: text, started, game, step: 0, stepBody: "", stepped: null, used: Date.now() });
  return started;
}

function step(id, body, text) {
  const held = episodes.get(id);
  if (held === undefined) throw new Problem(404, "unknown_episode", "no such episode is played here");
  held.used = Date.now();
  if (body.step === held.step && held.stepped !== null) {
    if (held.stepBody !== text) throw new Problem(409, "step_refused", `step ${body.step} was another answer`);
    return held.stepped; // the answer was lost: the world does not move a second time
  }
  if (body.step !== held.step + 1 || held.stepped?.done || held.scored) throw new Problem(409, "step_refused", `step ${body.step} is out of order`);
  Object.assign(held, { step: body.step, stepBody: text, stepped: held.game.step(body.message ?? {}) });
  return held.stepped;
}

function score(id, body) {
  const held = episodes.get(id);
  if (held === undefined) throw new Problem(404, "unknown_episode", "no such episode is played here");
  held.used = Date.now();
  if (body.step !== held.step || held.stepped === null || held.stepped.done) {
    throw new Problem(409, "step_refused", "the episode is over, or its last step is another one");
  }
  held.scored ??= held.game.score();
  return held.scored;
}

/** Standard Webhooks: v1,base64(HMAC-SHA256(key, "id.timestamp.body")); the id binds the call to its episode and step. */
function checkSignature(headers, callId, text) {
  if (secrets.length === 0) return;
  const { "webhook-id": id, "webhook-timestamp": timestamp, "webhook-signature": signatures = "" } = headers;
  const given = signatures.split(" ").map((one) => Buffer.from(one));
  const isRecent = /^\d+$/.test(timestamp ?? "") && Math.abs(Date.now() / 1000 - Number(timestamp)) <= TOLERANCE_S;
  const isRight = secrets.some((secret) => {
    const key = Buffer.from(secret.replace(/^whsec_/, ""), "base64");
    const digest = createHmac("sha256", key).update(`${id}.${timestamp}.${text}`).digest("base64");
    const right = Buffer.from(`v1,${digest}`);
    return given.some((one) => one.length === right.length && timingSafeEqual(one, right));
  });
  if (id !== callId || !isRecent || !isRight) throw new Problem(401, "unauthorized", "the call is not signed with a key of this server");
}

async function answer(request) {
  const chunks = [];
  let size = 0;
  for await (const chunk of request) {
    size += chunk.length;
    if (size > MAX_BYTES) throw new Problem(400, "bad_request", "the body is too long");
    chunks.push(chunk);
  }
  const text = Buffer.concat(chunks).toString("utf8");
  const [, resource, id, action] = request.url.split("/");
  if (request.method === "GET" && resource === "environment") {
    checkSignature(request.headers, "environment", text);
    return { protocol: 1, name: NAME, version: VERSION, capacity: CAPACITY, running: episodes.size, draining };
  }
  if (request.method === "DELETE" && resource === "episodes" && id) {
    checkSignature(request.headers, `${id}.end`, text);
    episodes.delete(id);
    return null;
  }
  if (request.method !== "POST" || resource !== "episodes") throw new Problem(404, "bad_request", "no such route");
  let body;
  try {
    body = JSON.parse(text);
  } catch {
    throw new Problem(400, "bad_request", "the body is not JSON");
  }
  const call = id === undefined ? `${body.id}.start` : action === "score" ? `${id}.score` : `${id}.${body.step}`;
  checkSignature(request.headers, call, text);
  if (id === undefined) return start(body, text);
  if (action === "step") return step(id, body, text);
  if (action === "score") return score(id, body);
  throw new Problem(404, "bad_request", "no such route");
}

const server = createServer(async (request, response) => {
  let status = 200;
  let body;
  const headers = { "content-type": "application/json" };
  try {
    body = await answer(request);
    if (body === null) status = 204;
  } catch (err) {
    const known = err instanceof Problem;
    status = known ? err.status : 500;
    body = { code: known ? err.code : "environment_failed", message: String(err.message).slice(0, 1000) };
    if (status === 503) headers["retry-after"] = "1";
  }
  response.writeHead(status, headers).end(body === null ? undefined : JSON.stringify(body));
});
server.keepAliveTimeout = 600_000; // the policy may think for minutes between two steps

setInterval(() => {
  for (const [id, held] of episodes) if (Date.now() - held.used > IDLE_S * 1000) episodes.delete(id);
}, 5000).unref();
process.on("SIGTERM", () => {
  draining = true;
  const closing = setInterval(() => episodes.size === 0 && process.exit(0), 100);
  setTimeout(() => process.exit(0), 60_000);
  closing.ref();
});
server.listen(port, secrets.length ? "0.0.0.0" : "127.0.0.1", () => {
  console.log(`${NAME}, version ${VERSION}, at http://127.0.0.1:${server.address().port}`);
});
