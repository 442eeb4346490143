"""Meets the other rank again and again, while both are watched. Arguments: DEADLINE_S."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from penstock.trainer.rank_orders import RankActivity, RankWatch, answer_watch, end_process
from penstock.trainer.ranks import Ranks

NUM_MEETINGS = 50


def main(arguments: Sequence[str]) -> int:
    """Meet until the end if DEADLINE_S is 0, with one minute for an answer; else until a rank hangs."""
    given = float(arguments[0])
    ranks, activity = Ranks(), RankActivity()
    channel, deadline_s = ranks.channel(), given or 60.0
    watch = RankWatch(channel, activity, deadline_s, end_process)
    if ranks.is_leader:
        watch.__enter__()
    else:
        answer_watch(channel, activity, deadline_s, end_process)
    meeting = 0
    while given or meeting < NUM_MEETINGS:
        activity.begin("meeting", meeting)
        ranks.barrier()
        meeting += 1
        if meeting == NUM_MEETINGS:
            sys.stdout.write(f"met {ranks.rank}\n")
            sys.stdout.flush()
        time.sleep(0.02)
    if ranks.is_leader:
        watch.__exit__()
    ranks.leave(0)
    return 0
