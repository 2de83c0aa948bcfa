"""The listener: bytes of clients in, answers out. Reads and frames HTTP; decides nothing about models or load."""
