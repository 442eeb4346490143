"""The trainer's story: collect, train, publish, evaluate, checkpoint.

| step       | consumes                 | waits for                    | unblocked by                     |
|------------|--------------------------|------------------------------|----------------------------------|
| collect    | scored groups            | a whole fresh batch          | reward service, workers, issuer  |
| train      | the batch                | nothing                      |                                  |
| publish    | a snapshot of the weights| nothing (a thread uploads)   |                                  |
| evaluate   | held-out prompts         | nothing, but at start and end| workers, reward service          |
| checkpoint | everything               | the disk                     |                                  |

Beside it run the issuer (new tasks as soon as the staleness bound admits them), the collector (the
next batch is fetched and decoded while this one trains), the publisher and the evaluator.
"""

from __future__ import annotations

from penstock.trainer.training import Training


def run(training: Training) -> None:
    """Train until the steps are done or somebody asks to stop."""
    training.begin()
    while training.goes_on:
        batch = training.collect()
        if not batch:  # asked to stop while waiting
            break
        training.step(batch)
        training.publish()
        training.evaluate_if_due()
        training.report()
        training.checkpoint_if_due()
    training.finish()
