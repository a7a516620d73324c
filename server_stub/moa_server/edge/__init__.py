"""The edge, between sockets and the app: protocols with deadlines, limits by connection and by token."""
