"""Files: atomic writes, locks, checksums, folders of our own in shared places, JSON and TOML from
outside.
"""
