"""One trainer on two nodes: two network namespaces with addresses of their own, one rank in each. `make proof NAME=nodes` (root; `ip`).

    python -m tests.rigs.proofs.nodes [FOLDER]

NATS, S3, the reward service and a worker run outside of both. The two nodes train, node 1 is killed with SIGKILL in the
middle and both are started again; the account is audited, and the run is replayed with both ranks on one node: the weights must
be the same, hash for hash. Then a node with a folder of its own. Prints a line for each step; exit code 1 when one does not hold.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from tests.rigs.compose.container import Network, interface
from tests.rigs.proofs.proof import Proof, folder_of
from tests.small_run import write_small_run

from penstock.deploy.local import connection_environment
from penstock.deploy.processes.child import Child
from penstock.deploy.processes.servers import NatsServer, S3Server

_STEPS, _BEFORE, _AGAIN = 24, 8, 16
_SUBNET = "10.77.0"
_GATEWAY = f"{_SUBNET}.1"  # this machine
_HOSTS = (2, 3)


def forward(port: int) -> None:
    """Pass connections to the gateway's ``port`` on to the loopback's, where the servers listen; returns when it listens."""
    listens = threading.Event()

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                target.write(data)
                await target.drain()
        except ConnectionError:
            pass
        finally:
            target.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer))

    async def serve() -> None:
        server = await asyncio.start_server(accept, _GATEWAY, port)
        listens.set()
        await server.serve_forever()

    threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
    if not listens.wait(10.0):
        raise TimeoutError(f"nothing listens on {_GATEWAY}:{port} after 10 s")


class Nodes(Proof):
    def __init__(self, base: Path, names: Sequence[str], environ: dict[str, str]) -> None:
        super().__init__(base, environ)
        self.names = names

    def node(self, number: int, attempt: str, *overrides: str) -> Child:
        place = ("--nodes", "2", "--node-rank", str(number), "--rdzv", f"{_SUBNET}.{_HOSTS[0]}:29500")
        # both namespaces have this machine's name, which stands for the loopback: gloo is told the interface
        where = ["ip", "netns", "exec", self.names[number], "env", f"GLOO_SOCKET_IFNAME={interface(_HOSTS[number])}"]
        return self.start(f"{attempt}-node{number}", "train", "run.toml", *place, *overrides, before=where)


def main() -> int:
    """Return 1 when a step of the proof does not hold."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the namespaces are removed then, too
    base = folder_of("nodes")
    trainer = {"steps": _STEPS, "num_ranks": 2, "zero_stage": 2, "checkpoint_every": 5}
    write_small_run(base, "nodes", num_train=1000, trainer=trainer)
    os.chdir(base)
    nats, s3 = NatsServer(base / "nats", log=base / "nats.log"), S3Server(base / "s3", log=base / "s3.log")
    nats.start()
    s3.start()
    with Network(_SUBNET) as network:
        forward(nats.port)
        forward(s3.port)
        inside = connection_environment(nats.settings, s3.settings)
        environ = {name: value.replace("127.0.0.1", _GATEWAY) for name, value in inside.items()}
        proof = Nodes(base, [network.add(host) for host in _HOSTS], {**os.environ, **environ, "OMP_NUM_THREADS": "1"})
        try:
            _prove(proof)
        finally:
            proof.stop_all()
            nats.stop()
            s3.stop()
    return proof.end()


def _prove(proof: Nodes) -> None:
    proof.check("streams and buckets are created", proof.ask("bootstrap", "run.toml").returncode == 0)
    proof.start("reward", "reward", "service", "run.toml", "reward_service.port=0")
    proof.start("worker", "rollout", "run.toml")
    first = [proof.node(number, "first") for number in (0, 1)]
    proof.wait(f"{_BEFORE} steps on two nodes", lambda: len(proof.steps("nodes")) >= _BEFORE)
    for pid in subprocess.check_output(["ip", "netns", "pids", proof.names[1]], text=True, timeout=20).split():
        os.kill(int(pid), signal.SIGKILL)
    print("    node 1 is killed with SIGKILL", flush=True)
    proof.wait("node 0 ends by itself", lambda: not first[0].alive)
    second = [proof.node(number, "second") for number in (0, 1)]
    proof.wait("both nodes, started again, end", lambda: not any(child.alive for child in second))
    proof.check(
        f"with exit codes {[child.returncode for child in second]}", not any(child.returncode for child in second)
    )
    proof.check(f"steps 1 to {_STEPS}, each once", proof.steps("nodes") == list(range(1, _STEPS + 1)))
    audit = proof.ask("audit", "nodes")
    proof.check("the accounting balances", audit.returncode == 0)
    replay = proof.ask("replay", "nodes")
    last = (replay.stdout + replay.stderr).strip().splitlines()[-1:]
    proof.check(f"replayed with both ranks on one node: {' '.join(last)}", replay.returncode == 0)
    _with_a_folder_of_its_own(proof)


def _with_a_folder_of_its_own(proof: Nodes) -> None:
    more = ("run.id=unshared", f"trainer.steps={_AGAIN}")
    proof.check("streams of a second run", proof.ask("bootstrap", "run.toml", more[0]).returncode == 0)
    nodes = [proof.node(0, "unshared", *more), proof.node(1, "unshared", *more, f"run.dir={proof.base}/elsewhere")]
    proof.wait("a node with a folder of its own ends both", lambda: not any(child.alive for child in nodes))
    said = "is seen by 1 of 2 ranks"
    logs = [(proof.base / f"unshared-node{number}.log").read_text() for number in (0, 1)]
    proof.check("both say why", all(said in text for text in logs) and all(child.returncode for child in nodes))


if __name__ == "__main__":
    sys.exit(main())
