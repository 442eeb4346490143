"""Work on model folders without torch: read, merge, write; imports protocol only."""
