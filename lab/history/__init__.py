"""Bugs that packages had, and whether today's cases tell the release before the fix from the one after it."""
