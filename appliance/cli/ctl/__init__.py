"""`appliance ctl`: the operator's shell. It asks a running router over its admin socket and shows the answer."""
