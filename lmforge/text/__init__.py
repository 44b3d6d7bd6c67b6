"""Raw text to shards, and conversations: sources, preparation, templates, messages, tool calls."""
