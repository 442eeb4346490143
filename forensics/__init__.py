"""What reads a run afterwards: `penstock replay`, `penstock runs backup` and `penstock runs restore`.

`replay` may import the trainer and the protocol, `backup` deploy and the console; no other package imports either. Read `README.md`.
"""
