"""Start Penstock: on one machine, under compose, on Kubernetes or Slurm, and what every run needs first (README.md)."""
