"""Dataset lint: what is wrong with a dataset's files, said without running anything."""
