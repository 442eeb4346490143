"""A language model as judge: templates, the chat endpoint it is asked at, its verdicts, and what they cost."""
