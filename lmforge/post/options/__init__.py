"""Options of fine-tuning and alignment."""
