"""The two programs: `gyrectl`, which steers, and `gyred`, which runs on each node."""
