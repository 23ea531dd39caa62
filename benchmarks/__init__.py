"""Time, memory and compile time of per-example statistics, against the plain gradient of the same run."""
