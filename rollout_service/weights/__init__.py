"""Follow published versions: local copies, announcements, swaps, and which versions can be served; may import engines."""
