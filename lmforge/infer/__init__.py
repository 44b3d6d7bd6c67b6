"""What a trained model does: write, and be measured."""
