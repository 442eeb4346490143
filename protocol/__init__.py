"""What the services agree on: facts, names, versions, objects, and the connections to NATS and S3.

```
                 TaskIssued                GroupGenerated               GroupScored
    trainer ─────────────────▶ rollout ─────────────────▶ reward ─────────────────▶ trainer
       │       (tasks)         workers      (generated)   service     (scored)         │
       │                          ▲                                                    │
       └── WeightsPublished ──────┘                  groups (Parquet), weights         │
           (weights, KV head)  ──▶ WeightsApplied    (safetensors) in S3  ◀────────────┘
```

| loop             | consumes         | waits for                             | unblocked by            |
|------------------|------------------|---------------------------------------|-------------------------|
| rollout worker   | TaskIssued       | a task within the staleness bound     | trainer issuing tasks   |
| weight follower  | head, Published  | a newer version                       | trainer publishing      |
| reward service   | GroupGenerated   | a generated group; an endpoint        | rollout workers         |
| trainer: collect | GroupScored      | `groups_per_step` fresh scored groups | reward service          |
| trainer: step    | a whole batch    | collect                               | collect                 |

This package imports none of the services and no torch.
"""
