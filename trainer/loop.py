"""The trainer's main loop: collect, train, record, publish, evaluate, report, checkpoint.

| stage      | consumes                 | waits for                    | unblocked by                     |
|------------|--------------------------|------------------------------|----------------------------------|
| collect    | scored groups            | a full fresh batch           | reward service, workers, issuer  |
| train      | the batch                | nothing                      |                                  |
| record     | the finished step        | nothing                      |                                  |
| publish    | a copy of the weights    | nothing (a thread uploads)   |                                  |
| evaluate   | held-out prompts         | nothing, but at start and end| workers, reward service          |
| checkpoint | everything               | a copy in memory, and for    | a thread that writes, commits    |
|            |                          | the checkpoint before        | and acknowledges                 |

In parallel run the issuer (new tasks as soon as the staleness bound admits them), the collector (fetches and decodes the
next batch while this one trains), the publisher, the evaluator and the thread of checkpoints.
"""

from __future__ import annotations

from penstock.trainer.training import Training


def run(training: Training) -> None:
    training.begin()
    while training.should_continue:
        batch = training.collect()
        if not batch:  # a stop was requested while it waited
            break
        learned = training.train(batch)
        training.record_step(batch, learned)
        training.publish()
        training.evaluate_if_due()
        training.report()
        training.checkpoint_if_due()
    training.finish()
