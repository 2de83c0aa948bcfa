"""Announced groups: who is listened to, what daemons' documents say together, and which group gets requests.

datagram -> reception -> daemons       (who is watched)
document -> views -> merge -> gate     (which groups there are, and why one gets nothing)
                             '-> published     (the endpoints that requests go to)
"""
