"""From data files to prompts: row formats, chat templates, checks, order; may import settings."""
