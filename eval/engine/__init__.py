"""The decoding engine: trees, lossless verification and one loop for every drafter."""
