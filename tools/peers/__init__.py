"""Other engines for CPUs on the workloads of `qwenrt bench`: installed, given the same weights, run and compared with ours."""
