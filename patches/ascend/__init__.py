"""Patches of MindSpeed, on Ascend NPUs."""
