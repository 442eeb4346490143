"""``python -m penstock.deploy.recipe``: `penstock recipe`."""

from penstock.console.cli.main import run_verb

if __name__ == "__main__":
    run_verb("recipe")
