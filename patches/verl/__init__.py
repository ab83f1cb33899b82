"""Patches of verl."""
