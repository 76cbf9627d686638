"""The case engine: draw a case, call the code under test, record its side effects, judge its outputs."""
