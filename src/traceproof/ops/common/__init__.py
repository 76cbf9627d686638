"""What several ops share."""
