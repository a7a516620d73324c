"""The page for browsers: its files, its bundle, its certificate, and how a phone finds it."""
