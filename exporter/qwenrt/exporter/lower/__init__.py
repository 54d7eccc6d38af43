"""One file per target: what the graph must look like for it, and which types it can hold."""
