"""How Penstock is started: on one machine, under compose, and what every run needs first.

| file           | does                                                                        |
|----------------|-----------------------------------------------------------------------------|
| `bound.py`     | ties a program's life to its parent's, then becomes that program            |
| `child.py`     | one child process with a log, in a group of its own                         |
| `supervise.py` | notices deaths, restarts with back-off, writes down what happened           |
| `servers.py`   | nats-server and the S3 server as children on loopback                       |
| `local.py`     | both over one locked data folder with kept credentials: `penstock up`       |
| `bootstrap.py` | streams, consumers, buckets of a run: idempotent                            |
| `ring.py`      | everything one run needs on this machine: `penstock train --local`          |
"""
