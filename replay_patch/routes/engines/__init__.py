"""One file for each rollout engine whose routes are understood; its name is `engine=`."""
