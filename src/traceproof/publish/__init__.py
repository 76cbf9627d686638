"""Bringing what was proved to a dataset: ledger, bundle, checker, and two ways to push."""
