"""Answer formats: how a model family writes tool calls and reasoning as text. One file each; see `answer_format.py`."""
