"""The frozen target and every head that drafts for it."""
