"""Inside a program's sandbox: pass connections to a loopback port on to a Unix socket, and run the program until it ends.

Run as ``python -I -S inside_sandbox.py SOCKET PORT PROGRAM [ARGUMENT...]``; ends as the program ends. The standard library alone: nothing
else of Penstock can be read in there.
"""

import contextlib
import os
import socket
import subprocess
import sys
import threading

_READ_BYTES = 65_536
_BACKLOG = 128


def main() -> None:
    target, port, *command = sys.argv[1:]
    listener = socket.create_server(("127.0.0.1", int(port)), backlog=_BACKLOG)
    threading.Thread(target=pass_on, args=(listener, target), daemon=True).start()
    try:
        status = subprocess.call(command)
    except OSError as err:
        sys.exit(f"cannot start {command[0]}: {err.strerror}")
    # as a shell says a signal; open connections have threads, which would be waited for
    os._exit(status if status >= 0 else 128 - status)


def pass_on(listener: socket.socket, target: str) -> None:
    while True:
        client, _ = listener.accept()
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(target)
        except OSError:
            client.close()
            server.close()
            continue
        for source, sink in ((client, server), (server, client)):
            threading.Thread(target=copy, args=(source, sink), daemon=True).start()


def copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_READ_BYTES):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    main()
