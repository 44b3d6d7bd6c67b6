"""Documents → shards → stream → batch. Nothing here knows of models."""
