"""The request road behind the door: which endpoint, its connection, the relay, the books."""
