"""Stands in for MinIO's image: its command line, variables, certificate folder, users and policies, before a real S3 server.

    python -m benchmarks.compose.s3_stand_in server /data --console-address :9001 --certs-dir /certs

Every request that a user's policy does not allow is a line on stdout.
"""

from __future__ import annotations

import argparse
import os
import ssl
import sys
import threading
import time
from pathlib import Path

from tests.policed_s3 import PolicedS3

from penstock.deploy.local import stop_on_signals
from penstock.deploy.processes.servers import S3Server


def main() -> int:
    """Serve on port 9000 until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("server", choices=["server"])
    parser.add_argument("data", type=Path)
    parser.add_argument("--console-address")
    parser.add_argument("--certs-dir", type=Path, required=True)
    options = parser.parse_args()
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(options.certs_dir / "public.crt", options.certs_dir / "private.key")
    root = (os.environ["MINIO_ROOT_USER"], Path(os.environ["MINIO_ROOT_PASSWORD_FILE"]).read_text().strip())
    stop = stop_on_signals()
    store = S3Server(options.data, log=Path("/tmp/rclone.log"))
    store.start()
    try:
        with PolicedS3(store.settings, root, host="0.0.0.0", port=9000, tls=tls) as server:
            threading.Thread(target=_tell, args=(server,), daemon=True).start()
            stop.wait()
    finally:
        store.stop()
    return 0


def _tell(server: PolicedS3) -> None:
    told = 0
    while True:
        for user, action, resource in server.refused[told:]:
            told += 1
            print(f"refused {user} {action} {resource}", flush=True)
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
