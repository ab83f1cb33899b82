"""Stand-in for the Python binding of Ascend's CANN."""
