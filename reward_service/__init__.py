"""The reward service: takes generated groups, scores each by the reward its task named, announces them.

```
    GroupGenerated ──▶ fetch and verify the pack ──▶ score every group ──▶ GroupScored ──▶ ack
                                                         │      │
                                     built-in rewards ◀──┘      └──▶ registered HTTP endpoints
```

A reward that cannot be computed is an error, never a 0: the group is delivered again, and after
``reward_service.endpoint_attempts`` attempts it is stored as a dead letter with its reason.
"""
