"""Questions of a user whose work repeats itself: several about each of some texts."""
