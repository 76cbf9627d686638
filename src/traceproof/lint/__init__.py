"""Dataset lint: what is wrong with a dataset's files, found without running anything."""
