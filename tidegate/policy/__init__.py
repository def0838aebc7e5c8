"""Users' policies from outside: who answers on the bus, and whether one behaves (`tidegate policy`)."""
