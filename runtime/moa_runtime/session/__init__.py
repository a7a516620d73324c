"""The protocol as two state machines without sockets, clock or threads.

A conversation is a committed prefix plus a tentative suffix; only a verdict extends the prefix.
:class:`~moa_runtime.session.client.ClientSession` is the device's end,
:class:`~moa_runtime.session.server.ServerSession` the verifier's. Both take and return whole messages.
"""
