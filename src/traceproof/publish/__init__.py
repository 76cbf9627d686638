"""Publishing what was verified: which definitions are, their pull requests, and the push to a hub."""
