"""A language model as judge: templates, calls of its chat endpoint, its verdicts, and their cost."""
