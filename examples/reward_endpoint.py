"""A complete reward endpoint on Python's built-in web server: signed requests, parts, errors, a lease.

python examples/reward_endpoint.py http://127.0.0.1:8700
penstock reward test short_answers
penstock train run.toml reward.name=short_answers

With a reward service that needs tokens, set REWARD_TOKEN; set REWARD_SECRET (whsec_...) to have requests signed.
"""

import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from penstock.reward_service.hosting import endpoint_kit
from penstock.reward_service.hosting.endpoint_kit import Offer, Score, ServiceAddress

SECRETS = tuple(os.environ.get("REWARD_SECRET", "").split())


def judge(group, text):
    """Return 1 for the right answer alone, less for every further word; a row without an answer is an error."""
    if not isinstance(group.ground_truth, str):
        return Score(error="this reward needs a text as ground truth")
    words = text.split()
    right = float(group.ground_truth in words)
    return Score(score=right / max(1, len(words)), parts={"right": right, "num_words": float(len(words))})


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        try:
            request = endpoint_kit.read(body, dict(self.headers), SECRETS)
        except endpoint_kit.BadSignature as err:
            return self.reply(401, str(err).encode())
        except endpoint_kit.BadRequest as err:
            return self.reply(422, str(err).encode())
        scores = [[judge(group, text) for text in group.completions] for group in request.groups]
        return self.reply(200, endpoint_kit.answer(request, scores))

    def reply(self, status, body):
        self.send_response(status)
        self.send_header("content-type", "application/json" if status == 200 else "text/plain")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *args):
        pass


def main():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    url = f"http://127.0.0.1:{server.server_address[1]}/score"
    service = ServiceAddress(sys.argv[1], os.environ.get("REWARD_TOKEN", ""))
    more = {"needs_ground_truth": True, "returns_parts": ["right", "num_words"], "min_score": 0, "max_score": 1}
    offer = Offer(name="short_answers", url=url, version="1", lease_s=15, secrets=SECRETS, more=more)
    try:
        with endpoint_kit.registered(service, offer):
            print(f"short_answers is registered at {service.url}; press Ctrl-C to stop", flush=True)
            server.serve_forever()
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
