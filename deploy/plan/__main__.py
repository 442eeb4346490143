"""``python -m penstock.deploy.plan``: `penstock plan`."""

from penstock.console.cli.main import run_verb

if __name__ == "__main__":
    run_verb("plan")
