"""`penstock runs backup` and `penstock runs restore`: a run's streams and objects as files, and back, on any servers; may import deploy and console."""
