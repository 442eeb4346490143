"""Write a screenshot of each view of the page into docs/images: `make screenshots`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tests.console.web.browsing import browser
from tests.console.web.control.api import Api
from tests.console.web.shown_run import ShownRun, environ_of

from penstock.deploy.bootstrap import bootstrap
from penstock.deploy.local import LocalStack
from penstock.protocol.transport.blobs import Blobs
from penstock.protocol.transport.bus import Bus

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "images"
_GROUP = "#/run/sorting/group?id=e0.p10.a0&chapter=1&at=0"
PICTURES = {  # name of the file: (address, view)
    "console-runs": ("#/", "runs"),
    "console-compare": ("#/compare?run=sorting&run=sorting-lr2", "compare"),
    "console-overview": ("#/run/sorting/overview", "overview"),
    "console-trajectories": ("#/run/sorting/trajectories", "trajectories"),
    "console-group": (_GROUP, "group"),
    "console-services": ("#/run/sorting/services", "services"),
    "console-weights": ("#/run/sorting/weights", "weights"),
    "console-rewards": ("#/run/sorting/rewards", "rewards"),
    "console-lineage": ("#/run/sorting/lineage", "lineage"),
    "console-dead-letters": ("#/run/sorting/dead-letters", "dead-letters"),
}


def main() -> None:
    """Write two runs with invented values, serve them, and take the pictures."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, LocalStack(Path(folder) / "store") as stack:
        runs = Path(folder) / "runs"
        blobs = Blobs(stack.s3)
        with Bus.connect(stack.nats, name="screenshots") as bus:
            for number, run_id in enumerate(("sorting-lr2", "sorting"), start=1):
                bootstrap(bus, blobs, run_id)
                ShownRun(run_id, bus, blobs).write(30 * number)
                (runs / run_id).mkdir(parents=True)
                settings = {"settings": {"trainer": {"lr": 2e-5 / number, "steps": 60}}}
                (runs / run_id / "config.json").write_text(json.dumps(settings))
            with (
                Api(runs, environ=environ_of(stack.nats, stack.s3)).served() as console,
                browser(console, viewport={"width": 1000, "height": 700}) as window,
            ):
                for name, (address, view) in PICTURES.items():
                    window.go(address, view)
                    window.page.wait_for_timeout(400)
                    if view == "group":
                        window.page.select_option("[aria-label='Colour by']", "ratio")
                        window.page.locator(".tokens span").last.click()
                        window.page.locator("section[aria-label=Tokens]").scroll_into_view_if_needed()
                    window.page.screenshot(path=FOLDER / f"{name}.png")
                window.page.emulate_media(color_scheme="dark")
                window.page.set_viewport_size({"width": 390, "height": 700})
                window.go("#/run/sorting/overview", "overview")
                window.page.wait_for_timeout(400)
                window.page.screenshot(path=FOLDER / "console-phone.png")
    print(f"{len(PICTURES) + 1} pictures in {FOLDER}")


if __name__ == "__main__":
    main()
