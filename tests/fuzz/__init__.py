"""Programs that look for trouble at random, as long as one likes; what they find is kept and replayed by fast tests."""
