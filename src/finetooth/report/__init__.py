"""Facts to what a person reads."""
