"""Every op_type that this project knows: a file per family, which declares its ops as data."""
