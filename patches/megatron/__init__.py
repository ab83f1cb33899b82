"""Patches of Megatron-core."""
