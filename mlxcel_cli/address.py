"""Addresses of servers as they may be shown: without the name and password that one can hold."""

import re

SECRET = re.compile(r"[^\s/'\"]+@")
HIDDEN = "***@"


def shown(text: str) -> str:
    """`text`, a URL or what holds some, without names and passwords in it."""
    return SECRET.sub(HIDDEN, text)


def shown_whatever(text: str) -> str:
    """The same for what is no address: all before its last @ may be meant as a password."""
    _, at, rest = text.rpartition("@")
    return HIDDEN + rest if at else text
