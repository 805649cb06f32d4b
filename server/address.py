"""Addresses as people write them: what HOST:PORT says, whether it leaves the machine, and listening there."""

import errno
import ipaddress
import os
import socket

from engine.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address, is this machine and nothing else."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def split_address(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT; an IPv6 host is written in brackets. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdecimal() and int(port) < 1 << 16):
        raise ValueError(f"{text!r} is no HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_local(address: str) -> bool:
    """Whether nothing that is sent to this HOST:PORT leaves the machine. Raises ValueError."""
    return is_loopback(split_address(address)[0])


def listen(host: str, port: int, backlog: int) -> socket.socket:
    """A socket that listens there. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if host:
            socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):  # the latter of IDNA: an empty label, or one of more than 63 letters
        raise OSError("no such host is known") from None
    return socket.create_server((host, port), family=family, backlog=backlog)


def cannot_listen(setting: str, where: str, fault: OSError) -> ConfigError:
    """What is said where an address of `setting` cannot be had."""
    why = os.strerror(fault.errno) if fault.errno else str(fault)
    hint = "--port takes another one, 0 a free one" if (setting, fault.errno) == ("host", errno.EADDRINUSE) else ""
    return ConfigError(setting, f"cannot listen on {where}: {why}", hint=hint)
