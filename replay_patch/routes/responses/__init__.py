"""What rollout engines return, read: where the ids are, how they are packed, what is wrong."""
