"""The recorder's I/O: the durable consumer of the trace stream, and the sinks."""
