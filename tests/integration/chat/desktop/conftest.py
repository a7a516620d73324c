from support.chat.desktop.fixtures import *  # noqa: F403  fixtures
