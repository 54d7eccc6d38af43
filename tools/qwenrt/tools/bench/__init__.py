"""`qwenrt bench ENGINE`: workloads on an engine, each in its own process, beside what the machine can do at most."""
