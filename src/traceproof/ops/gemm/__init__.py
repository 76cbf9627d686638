"""The op_type gemm."""
