"""Everything that proposes tokens."""
