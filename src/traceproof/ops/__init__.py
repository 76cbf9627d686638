"""One module (or folder) an op_type: sizes, inputs, the float64 oracle, how each output is compared.

The module's name is the op_type. `registry.get` imports it on demand; `registry.known` lists the names without
importing anything, so that the driver's environment, which holds no torch, can validate a selection.
"""
