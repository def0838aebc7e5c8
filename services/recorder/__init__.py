"""What happened: the durable trace rows of the bus, written to sinks (rolled gzip files, standard output).

`segment` is the file format, `recent` tells a redelivered row from a new one, `core` decides when a batch is written
and when a file is full; `shell` reads the stream and writes.
"""
