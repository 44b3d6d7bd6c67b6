"""Reads files of text, of records and of tokens, always in the same order.

It neither tokenizes nor writes.

Begin with `text_sources.py` (a corpus as units of work) and `units.py` (their documents);
`folders.py` tells which files of a folder are read; `records.py` reads JSON lines, JSON lists and
parquet for everyone.

For other packages: `open_text_source`, `read_records`, `find_record_files`, `find_files`.
"""
