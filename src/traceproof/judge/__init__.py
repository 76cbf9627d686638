"""The judge: compares outputs with the oracle, by the gate that the op declares for each output."""
