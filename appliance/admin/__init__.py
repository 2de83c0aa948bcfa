"""The operator's side of a router: metrics over TCP, administration over a Unix socket."""
