"""What a source's new commit or version touches, what it changed, and which commit changed it."""
