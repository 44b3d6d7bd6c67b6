"""What cannot be imported."""

raise KeyError("its own")
