"""Answer formats: how a model family writes tool calls and reasoning as text; see `answer_format.py`."""
