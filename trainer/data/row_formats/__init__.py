"""The forms of rows that are read: one file each, found by `row_format.ROW_FORMATS`."""
