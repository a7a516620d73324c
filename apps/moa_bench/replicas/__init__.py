"""What conversations feel when one of two replicas drains and one dies."""

#: What may stand before the replicas.
PROXIES = ("haproxy", "ray")
#: How many there are.
REPLICAS = 2
