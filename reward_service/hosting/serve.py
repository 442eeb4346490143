"""``serve FILE.py``: a user's reward function as an HTTP endpoint, registered while it runs.

User code runs here, in a process that its user started, or in the worker processes of a reward service
(`user_code/worker.py`), and in no other process.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from penstock.reward_service.hosting.commands import ServeOptions
from penstock.reward_service.hosting.hosted_app import HostedFunction
from penstock.reward_service.hosting.served_reward import serve_reward
from penstock.reward_service.user_code import user_file


def serve_file(
    file: Path, function: str | None, options: ServeOptions, *, conversational: bool | None, timeout_s: float
) -> int:
    reward = user_file.load(file, function, conversational=conversational)
    version = hashlib.sha256(reward.file.read_bytes()).hexdigest()[:8]
    return serve_reward(HostedFunction(reward, version, {"timeout_s": timeout_s}), file.stem, options)
