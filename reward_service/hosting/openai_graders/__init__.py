"""OpenAI's graders, evaluated here: string_check, text_similarity, score_model, and multi of those."""
