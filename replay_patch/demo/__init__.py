"""`replay-patch demo`: `launch` runs the `experiment` in its own process; `report` shows it."""
