"""Actors: functions from a definition's inputs to its outputs, each with a name and a stack."""
