"""Sources: the repositories and packages that ground truths come from, each at one pinned commit or version."""
