"""What a change of a source's commit or version touches, what it changed, and which commit did it."""
