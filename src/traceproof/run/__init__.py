"""The case engine: draw a case, call the code under test, see what it did beside computing, judge its outputs."""
