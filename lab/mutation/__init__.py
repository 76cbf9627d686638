"""Systematic mutants of references: how many of them does the judge tell from the right one?"""
