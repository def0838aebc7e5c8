"""The ingress's sockets, bus and threads around its pure core."""
