"""``python -m penstock.forensics.backup backup|restore``: `penstock runs backup` and `penstock runs restore`."""

from penstock.console.cli.main import run_verb

if __name__ == "__main__":
    run_verb("runs")
