"""``serve FILE.py``: a user's reward function as an HTTP endpoint, registered while it runs.

User code runs here, in a process that its user started, or in the worker processes of a reward service
(`user_code/worker.py`), and in no other process.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path

from penstock.reward_service.hosting import served_reward
from penstock.reward_service.hosting.hosted_app import HostedFunction
from penstock.reward_service.user_code import user_file

_EPILOG = """\
The file holds one of these (or several; choose one with --function); each may be async:

  def compute_score(data_source, solution_str, ground_truth, extra_info=None):      # verl, ROLL
      return 1.0                                    # or {"score": 1.0, "format": 0.5}: other keys are parts
  def compute_score(data_sources, solution_strs, ground_truths, extra_infos):       # verl in batches
      return [1.0, ...]
  def reward(prompts, completions, **columns):                                      # TRL, once per group
      return [1.0, ...]                             # columns of the row, each as a list
  def reward_func(queries, prompts, labels):                                        # OpenRLHF
      return {"rewards": [1.0, ...]}
  class Judge:                                                                      # keeps state between calls
      def setup(self): ...                          # once, before it is registered
      def __call__(self, completions, **columns): return [...]

Raise an exception when a completion cannot be scored: it becomes the score's error, and the group is retried.
An error is never a 0. The first traceback of each kind is printed here.

Example:  penstock reward serve my_reward.py --register http://127.0.0.1:8700
          penstock reward test my_reward
          penstock train run.toml reward.name=my_reward

Ctrl-C unregisters it and lets calls in progress finish; a second Ctrl-C exits at once.
"""


def main(arguments: Sequence[str]) -> int:
    """Serve until SIGTERM or Ctrl-C; raises PenstockError when the file or the registration is wrong."""
    parser = argparse.ArgumentParser(
        prog="penstock reward serve",
        description="Serve a Python file with a reward function as an endpoint of a reward service.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, help="the Python file")
    parser.add_argument("--function", help="name of the function, if the file has several")
    parser.add_argument(
        "--conversational",
        action=argparse.BooleanOptionalAction,
        help="TRL: give prompts and completions as lists of messages, or as texts (default: as the function's code reads them)",
    )
    parser.add_argument(
        "--timeout-s", type=float, default=30.0, help="deadline of one call in seconds, retries included (default: 30)"
    )
    served_reward.add_options(parser, default_name="the file's name")
    options = parser.parse_args(arguments)
    reward = user_file.load(options.file, options.function, conversational=options.conversational)
    version = hashlib.sha256(reward.file.read_bytes()).hexdigest()[:8]
    where = served_reward.address(options, options.file.stem)
    served_reward.serve(HostedFunction(reward, version, {"timeout_s": options.timeout_s}), where)
    return 0
