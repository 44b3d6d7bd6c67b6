"""Conversations, preferences and prompts as tokens, with a mask of what is scored.

Losses are in core/losses/ and post/objectives/.

Begin with `conversations.py` and `preferences.py` (records → tokens). `templates.py` applies a chat
template, one of those in `template_sources.py`; its code runs in `jinja_sandbox.py`. `pieces.py`
finds in its text what the conversation says. The text is encoded in `layout.py`. `examples.py`
stores tokens and packs them; `spill_buffer.py` keeps them out of memory meanwhile.
`library_functions.py` makes conversations from Python's standard library.

For other packages: the `read_…` functions, `ChatTemplate`, `write_examples`, `ExampleFolder`,
`example_dataset`.
"""
