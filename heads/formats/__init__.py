"""Readers and writers of foreign checkpoint layouts, one file a format."""
