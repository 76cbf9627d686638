"""Laws that a right computation obeys whatever the right values are, and references put to them."""
