"""The embedded engine: a small torch server that speaks SGLang's HTTP contract.

    HTTP (asyncio)                        engine thread
    app ── bodies ─ Job ──► inbox ──► scheduler: who runs now?   (pure)
     ▲                                   │
     └── replies ◄── Job done ◄── runner: prefill, decode, sample (torch)

``http/app`` consumes HTTP bodies and waits for jobs; ``engine_thread`` consumes the inbox, waits for work, and is
unblocked by a new job, a control command or new weights. A weight update is read and checked in another thread, while
the engine computes; the engine thread only exchanges two references, between two forward passes.

Reading order: ``sequence``, ``scheduler``, ``engine_thread``, ``runner``, ``model/transformer``, ``http/app``.
"""
