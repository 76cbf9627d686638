"""What ground truths of several op_types share."""
