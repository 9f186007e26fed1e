"""Energy-based fine-tuning: features of a frozen network, and what each mode adds to a training step."""
