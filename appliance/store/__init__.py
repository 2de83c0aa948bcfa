"""What operators decided, on disk: cordons, certificates and their revocation, join tokens, and who did what.

Facts about the fleet are never here: a database can be wrong about the cluster, the cluster cannot.
"""
