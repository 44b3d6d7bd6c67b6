"""What a batch is worth: each objective returns a sum over tokens, pairs or completions, never a mean."""
