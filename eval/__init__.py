"""From a head to figures: the decoding engine, metrics, benchmark and report."""
