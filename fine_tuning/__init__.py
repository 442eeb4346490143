"""Training on given answers, without rollouts and services: `penstock sft`, `penstock dpo`, `penstock rm`.

May import the trainer and the protocol; the trainer does not import it. Read `README.md`.
"""
