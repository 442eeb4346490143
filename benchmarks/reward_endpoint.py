"""A reward endpoint with a chosen fault, for the load benchmark; it serves the Penstock reward API on plain sockets.

python -m benchmarks.reward_endpoint BEHAVIOUR PORT

The benchmark computes the correct score of each completion (`score_of`), so that an invented score is detected.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import zlib
from typing import Any

SLOW_S = 2.0
HUNG_S = 12.0  # after its start; then it works normally
FAULTY_SHARE = 0.3
_HUGE = b" " * (8 * 1024 * 1024)


def score_of(completion: str) -> float:
    """Return the one correct score of a text, from 0 to 1."""
    return (zlib.crc32(completion.encode()) % 1000) / 1000


def answer_to(request: dict[str, Any]) -> dict[str, Any]:
    return {
        "results": [
            {"group_id": group["group_id"], "scores": [{"score": score_of(text)} for text in group["completions"]]}
            for group in request["groups"]
        ]
    }


class Endpoint:
    def __init__(self, behaviour: str) -> None:
        self._behave = getattr(self, f"_{behaviour}")
        self._random = random.Random(0)
        self._healthy_at = asyncio.get_running_loop().time() + HUNG_S

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.split("content-length:")[1].split("\r\n")[0])
                request = json.loads(await reader.readexactly(length))
                status, body = await self._behave(request)
                if status == 0:
                    break
                writer.write(f"HTTP/1.1 {status} x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _good(self, request: dict[str, Any]) -> tuple[int, bytes]:
        return 200, json.dumps(answer_to(request)).encode()

    _dying = _good  # the process that started it kills it

    async def _slow(self, request: dict[str, Any]) -> tuple[int, bytes]:
        await asyncio.sleep(SLOW_S)
        return await self._good(request)

    async def _hung(self, request: dict[str, Any]) -> tuple[int, bytes]:
        if asyncio.get_running_loop().time() < self._healthy_at:
            await asyncio.sleep(3600)
        return await self._good(request)

    async def _flaky(self, request: dict[str, Any]) -> tuple[int, bytes]:
        """Return errors, or close the connection without an answer."""
        if self._random.random() < FAULTY_SHARE:
            return self._random.choice([(500, b"out of order"), (503, b"busy"), (0, b"")])
        return await self._good(request)

    async def _lying(self, request: dict[str, Any]) -> tuple[int, bytes]:
        """Return too few scores, NaN, other groups, eight megabytes or no JSON, all with status 200."""
        if self._random.random() >= FAULTY_SHARE:
            return await self._good(request)
        answer = answer_to(request)
        fault = self._random.choice(["count", "nan", "groups", "huge", "text"])
        if fault == "huge":
            return 200, _HUGE
        if fault == "text":
            return 200, b"<html>all is well</html>"
        for result in answer["results"]:
            if fault == "count":
                result["scores"].pop()
            elif fault == "nan":
                result["scores"][0]["score"] = float("nan")
            else:
                result["group_id"] += "x"
        return 200, json.dumps(answer).encode()


async def main(behaviour: str, port: int) -> None:
    endpoint = Endpoint(behaviour)
    server = await asyncio.start_server(endpoint.serve, "127.0.0.1", port, limit=2**24)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
