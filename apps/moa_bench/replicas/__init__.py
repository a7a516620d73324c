"""What conversations feel when one of two replicas drains and one dies."""

#: What may stand before the replicas.
PROXIES = ("haproxy", "ray")
#: How many there are.
REPLICAS = 2
#: Chats at once: they have one address, of which haproxy.cfg takes no more connections.
MOST_SESSIONS = 256
