"""Take packs of tasks from the queue, generate, store and announce their groups; may import environments, engines and weights."""
