"""The versions of a run as models: tags, scores, selection, model cards, and exchange with the Hugging Face hub."""
