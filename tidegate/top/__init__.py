"""A live view of sessions and workers, from facts on the bus alone."""
