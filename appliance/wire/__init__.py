"""Bytes and messages: sockets watched by one poller, HTTP/1.1 heads and framing, server-sent events, TLS."""
