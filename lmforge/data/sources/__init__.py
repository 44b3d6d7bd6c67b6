"""Reads files of text, of records and of tokens, always in the same order. It neither tokenizes nor writes.

Begin with `text_sources.py` (a corpus as units of work) and `units.py` (their documents); `open_source.py` tells what a source
is; `records.py` reads JSON lines, JSON lists and parquet for everyone.

For other packages: `open_source`, `open_text_source`, `read_records`, `json_lines`, `parquet_rows`.
"""
