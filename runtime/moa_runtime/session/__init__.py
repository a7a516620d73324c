"""The protocol as a pure state machine: no sockets, no clock, no threads.

A conversation is a committed prefix plus a tentative suffix, and only a verdict extends the prefix.
:class:`~moa_runtime.session.client.ClientSession` and :class:`~moa_runtime.session.server.ServerSession`
are the two ends; both take whole messages in and hold messages to send.
"""
