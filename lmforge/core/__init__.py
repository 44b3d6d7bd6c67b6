"""The part that trains: it imports no wing."""
