"""The embedded engine: a small torch server that speaks SGLang's HTTP contract.

    HTTP (asyncio)                        engine thread
    app ── bodies ─ Job ──► inbox ──► scheduler: who runs now?   (pure)
     ▲                                   │
     └── replies ◄── Job done ◄── runner: prefill, decode, sample (torch)

``app`` consumes HTTP bodies and waits for jobs; ``engine`` consumes the inbox, waits for work, and is
unblocked by a new job, a control command or new weights. A weight update is read and checked beside the
engine; only the swap of two references happens in its thread, between two forward passes.

Reading order: ``sequence``, ``scheduler``, ``engine``, ``runner``, ``transformer``, ``app``.
"""
