"""Reading and running a dataset's tests to find those that can not fail."""
