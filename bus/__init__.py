"""How it is said: subjects, connection, request/reply, streams, the in-memory twin, the policy SDK."""
