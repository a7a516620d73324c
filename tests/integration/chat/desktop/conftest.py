from support.chat.desktop.fixtures import appearance, connected, open_window, options, profile  # noqa: F401  fixtures
