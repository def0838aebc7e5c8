"""``tidegate doctor``: what is wrong with a system, and what to do about it."""
