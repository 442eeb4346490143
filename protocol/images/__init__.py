"""Images of prompts and tool results: from bytes to what a model computes, in one way for engine and trainer."""
