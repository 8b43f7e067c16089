"""Conversations to token rows to features."""
