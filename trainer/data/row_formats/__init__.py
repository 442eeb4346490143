"""The formats of rows that are read, found by `row_format.ROW_FORMATS` in any file here."""
