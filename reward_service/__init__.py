"""The reward service: takes generated groups, scores each by the reward its task named, announces them.

```
    GroupGenerated ──▶ fetch and verify the pack ──▶ score every group ──▶ GroupScored ──▶ ack
                                                         │      │
                                     built-in rewards ◀──┘      └──▶ registered HTTP endpoints
```

A reward that cannot be had is an error, never a 0: the group waits, comes again, and after
``reward_service.endpoint_attempts`` deliveries lies among the dead letters with its reason.
"""
