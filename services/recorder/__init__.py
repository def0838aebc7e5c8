"""What happened: the durable trace rows of the bus, written to sinks (rolled gzip files, standard output, an
OpenTelemetry collector); and what becomes rows here: tool events of harnesses, samples of workers' load.

`core` decides, for one sink, what is a new row (`rows`, `recent`), when a batch is written and what is acknowledged.
`spans` and `span_builder` make spans and log records of rows. `tool_messages` is what harnesses send, `tool_sessions`
whose it is, `tool_starts` when it began, `tool_events` what becomes of it, `tool_inference` what is known where they
say nothing. `loads` samples load. `shell` reads the stream, the socket and HTTP, and writes.
"""
