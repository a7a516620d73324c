"""What stands between sockets and the app: parsers with bounds, limits by connection and by token."""
