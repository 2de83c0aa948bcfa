"""What this node is made of: probes that run commands and read files, apart from parsers that understand the texts."""
