"""Train draft heads for speculative decoding and measure what each one buys."""

__version__ = "0.1.0"
