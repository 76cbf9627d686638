"""What a machine can prove: found by looking and asking, nothing is built or changed."""
