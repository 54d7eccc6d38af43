"""Engines on Ray, on this machine or on many: workers of a batch job, and replicas behind one server (needs the extra `ray`)."""
