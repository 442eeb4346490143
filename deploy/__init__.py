"""How Penstock is started: on one machine, under compose, and what every run needs first.

| file              | does                                                                           |
|-------------------|--------------------------------------------------------------------------------|
| `child.py`        | one child process with a log file, in a process group of its own               |
| `supervise.py`    | restarts child processes that exit, with back-off, and records the events      |
| `servers.py`      | nats-server and the S3 server as child processes on the loopback               |
| `local.py`        | both over one locked data folder with stored credentials: `penstock up`        |
| `bootstrap.py`    | create the streams, consumers and buckets of a run; idempotent                 |
| `nats_config.py`  | the configuration of a NATS server, with the rights of each role               |
| `config_show.py`  | every setting of every service with its source: `penstock config show`         |
| `early_checks.py` | what is certain to fail, found before a process is started                     |
| `local_run.py`    | all processes of one run on this machine: `penstock train --local`             |
| `train_attached.py` | the trainer of a run whose services run elsewhere: `penstock train`          |
"""
