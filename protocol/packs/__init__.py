"""A pack of groups as one Parquet object: written, bounded before anything is decoded, read, and held against its task."""
