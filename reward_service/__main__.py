"""``python -m penstock.reward_service``: the service itself, the list of its rewards, or a file served as a reward.

python -m penstock.reward_service [RUN.toml ...] [section.key=value ...]
python -m penstock.reward_service rewards [NAME]                      (all of them, or one with its parameters)
python -m penstock.reward_service rewards --write docs/graders.md     (renew the tables of the documentation)
python -m penstock.reward_service sandbox [auto|bubblewrap|landlock]   (which one works here; exit code 1 for none)
python -m penstock.reward_service check-tests < ROWS.jsonl            (run the rows' test programs; see check_tests.py)
python -m penstock.reward_service serve FILE.py [--name N] [--port P] [--register URL] [--token-file F]
python -m penstock.reward_service serve-judge JUDGE.toml [the same options]
python -m penstock.reward_service serve-grader GRADER.json [the same options]
"""

from __future__ import annotations

import asyncio
import difflib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock.protocol import logs, process_end
from penstock.protocol.config.run_file import load, split_arguments
from penstock.protocol.errors import ConfigError, PenstockError
from penstock.protocol.process_end import ends_quietly, error_text
from penstock.protocol.traces.traces import recording
from penstock.reward_service.settings import RewardSettings


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    process_end.install("reward")
    try:
        return _command(arguments)
    except (PenstockError, BaseExceptionGroup) as err:
        texts = list(dict.fromkeys(_texts(err)))
        if not texts:
            raise
        sys.stderr.write(error_text("".join(f"{text}\n" for text in texts)))
        return 1


def _command(arguments: Sequence[str]) -> int:
    match arguments:
        case ["-h" | "--help", *_]:
            sys.stdout.write(__doc__ or "")
            return 0
        case ["rewards"]:
            return _list_rewards()
        case ["rewards", "--write", page]:
            return _write_tables(Path(page))
        case ["rewards", name]:
            return _show_reward(name)
        case ["sandbox", *rest]:
            return _probe_sandbox(rest[0] if rest else "auto")
        case ["check-tests"]:
            from penstock.reward_service import check_tests  # noqa: PLC0415 see above

            return asyncio.run(check_tests.check(sys.stdin, sys.stdout))
        case [("serve" | "serve-judge" | "serve-grader") as command, *rest]:
            return _serve(command, rest)
        case _:
            return _run_service(arguments)


def _serve(command: str, arguments: Sequence[str]) -> int:
    from penstock.protocol.command_line import application, run  # noqa: PLC0415 the service itself has settings, and no options
    from penstock.reward_service.hosting import commands  # noqa: PLC0415 see above

    app = application(f"python -m penstock.reward_service {command}")
    app.default(getattr(commands, command.replace("-", "_")))
    return run(app, arguments)


def _run_service(arguments: Sequence[str]) -> int:
    from penstock.reward_service import service  # noqa: PLC0415 listing rewards needs no server
    from penstock.serving.web_server import use_one_heap  # noqa: PLC0415 see above

    files, overrides = split_arguments(arguments)
    settings = load(RewardSettings, files=files, overrides=overrides, environ=os.environ).settings
    logs.configure("reward", level=settings.reward_service.log_level)
    use_one_heap()  # before any thread has a separate heap
    with recording(os.environ, "reward", service_id=settings.reward_service.id, run_id=settings.run.id) as traces:
        asyncio.run(service.run(settings, traces))
    return 0


def _list_rewards() -> int:
    from penstock.reward_service.registry import user_rewards  # noqa: PLC0415 see above
    from penstock.reward_service.registry.built_in import BUILT_INS  # noqa: PLC0415 see above

    for name, reward in BUILT_INS.items():
        sources = [source for source in reward.data_sources if source != name]
        also = f"\n{'':16}also as {', '.join(sources)}" if sources else ""
        sys.stdout.write(f"{name:<15} {reward.description}{also}\n")
    for name, path in user_rewards.installed().items():
        sys.stdout.write(f"{name:<15} {path} (entry point of an installed package)\n")
    sys.stdout.write("\nnext: python -m penstock.reward_service rewards NAME lists its parameters, for reward.define\n")
    return 0


def _show_reward(name: str) -> int:
    from penstock.reward_service.registry.built_in import BUILT_INS  # noqa: PLC0415 see above

    if name not in BUILT_INS:
        near = difflib.get_close_matches(name, BUILT_INS, n=3, cutoff=0.5)
        raise ConfigError(
            f"no built-in reward {name}; {'did you mean ' + ' or '.join(near) if near else 'see: rewards'}"
        )
    reward = BUILT_INS[name]
    sys.stdout.write(f"{name}: {reward.description}\n")
    for key, field in reward.parameters.model_fields.items():
        default = "required" if field.is_required() else f"default {field.default!r}"
        sys.stdout.write(f"  {key:<12} {default}: {field.description}\n")
    if not reward.parameters.model_fields:
        sys.stdout.write("  no parameters\n")
    return 0


def _write_tables(page: Path) -> int:
    from penstock.reward_service.registry.built_in import update_tables  # noqa: PLC0415 see above

    page.write_text(update_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


def _probe_sandbox(wanted: str) -> int:
    from penstock.sandbox import canary  # noqa: PLC0415 see above

    sandbox = canary.probe(wanted)
    sys.stdout.write(f"{sandbox}\n")
    return int(sandbox.kind is None)


def _texts(err: BaseException) -> Iterator[str]:
    """Yield what errors of ours say; nothing for a group that holds another kind, which deserves its traceback."""
    if isinstance(err, BaseExceptionGroup):
        ours, others = err.split(PenstockError)
        if ours is not None and others is None:
            for exception in ours.exceptions:
                yield from _texts(exception)
    else:
        yield str(err)


if __name__ == "__main__":
    with ends_quietly():
        code = main()
    sys.exit(code)
