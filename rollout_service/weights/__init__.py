"""Follows published versions: local mirror, announcements, swaps, which versions can be served; may import engines."""
