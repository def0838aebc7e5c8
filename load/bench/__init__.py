"""Benchmarks: each prints one JSON object last, with ratios against a baseline measured in the same run."""
