"""Op_types: sizes, inputs, the float64 oracle, how each output is compared, ground truths, ways of being wrong.

A file of `families` declares some. None imports PyTorch before it is used, so that the driver's environment, which
holds none, can validate a selection.
"""
