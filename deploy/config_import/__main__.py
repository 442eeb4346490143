"""``python -m penstock.deploy.config_import``: `penstock config import`."""

from penstock.console.cli.main import run_verb

if __name__ == "__main__":
    run_verb("config", "import")
