"""What reads a run afterwards: `penstock replay`, `audit`, `rescore`, `runs backup` and `runs restore`.

`replay` may import the trainer and the protocol, the others deploy and the console, whose verbs call them; no other package imports
them. Read `README.md`.
"""
