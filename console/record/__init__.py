"""What a run has recorded: audit, lineage, rescoring; may import tools."""
