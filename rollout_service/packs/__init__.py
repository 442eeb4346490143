"""A pack of tasks from the queue to the announced groups; may import environments, engines and weights."""
