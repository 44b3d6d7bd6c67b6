"""Files of text and of records, read in an order that never changes. Nothing here tokenizes or writes.

Begin with `text_sources.py` (a corpus as units of work); `records.py` reads JSON lines, JSON lists and parquet for everyone.

For other packages: `open_text_source`, `read_records`, `json_lines`, `parquet_rows`.
"""
