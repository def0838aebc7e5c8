"""Both twins of `kvcore` fed the same random input: ``python -m tests.fuzz.kvcore --minutes 5 --seed 1``."""
