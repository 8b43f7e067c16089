"""Token rows or features to head checkpoints."""
