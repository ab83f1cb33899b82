"""What an untested Megatron has changed under the patches, told before anything runs."""
