"""The judge: compares what actors gave with the oracle, by the gate that the op declares for each output."""
