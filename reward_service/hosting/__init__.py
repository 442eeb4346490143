"""A user's reward served as an HTTP endpoint: files, judges, OpenAI graders; may import endpoints."""
