"""Which combinations of what matters cases exercise, and the smallest cases that would close the gaps."""
