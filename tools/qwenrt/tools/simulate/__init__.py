"""`qwenrt simulate`: the shipped scheduler and router in simulated time, with a cost model in place of the model."""
