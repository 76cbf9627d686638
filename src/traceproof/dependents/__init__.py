"""Who depends on a file of a Python repository: an import graph, read without running anything."""
