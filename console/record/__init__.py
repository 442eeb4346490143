"""What a run has recorded, for verbs, page and trackers: lineage, stopped batches, its stores; may import tools."""
