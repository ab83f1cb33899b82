"""What a Megatron that no one has seen has moved under the patches, told before anything runs."""
