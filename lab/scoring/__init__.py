"""Scores a suite of tests by the planted bugs it catches, and by its false alarms."""
