"""The loop and what it needs: stages, optimizer, metrics, health."""
