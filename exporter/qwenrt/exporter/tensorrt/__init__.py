"""From a lowered graph to TensorRT plans: profiles, the build in a process of its own, plans added to an engine folder."""
