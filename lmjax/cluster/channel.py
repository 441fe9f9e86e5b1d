"""The sockets between rank 0 and each other rank: CURVE over TCP, bound to the master address alone.

Two a pair, since a zmq socket belongs to one thread: ``orders`` (the loops' threads, one way) and ``words`` (the
heartbeats' threads, both ways). Keys of both ends follow from one cluster key, so who does not have it is not heard.
"""

from __future__ import annotations

import hashlib
import ipaddress
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq
import zmq.auth.thread
from zmq.utils import z85

from lmjax.config import ConfigError

LINGER = 1000  # milliseconds that a closed socket may take for what was sent last
_guards: list[zmq.auth.thread.ThreadAuthenticator] = []  # they stop when they are collected


@dataclass
class Link:
    """This end of the connection to another rank. ``monitor``: events of ``words``."""

    rank: int
    orders: zmq.Socket
    words: zmq.Socket
    monitor: zmq.Socket

    def close(self) -> None:
        """May be called twice."""
        if self.words.closed:
            return
        self.words.disable_monitor()
        self.monitor.close(linger=0)
        self.orders.close(linger=LINGER)
        self.words.close(linger=LINGER)


class _OnlyRanks:
    """For ``ThreadAuthenticator``: the key that all followers have."""

    def __init__(self, public: bytes):
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


def require_curve() -> None:
    if not zmq.has("curve"):
        raise ConfigError("--nnodes: this pyzmq was built without CURVE, so the ranks could not trust each other")


def listen(context: zmq.Context, address: str, key: str, ranks: list[int]) -> tuple[list[Link], dict[int, str]]:
    """Rank 0's links, and by rank the ports that the other end connects to: "orders words"."""
    require_curve()
    keys, follower = _key_pair(key, "leader"), _key_pair(key, "follower")
    guard = zmq.auth.thread.ThreadAuthenticator(context)
    guard.start()
    _guards.append(guard)
    guard.configure_curve_callback(domain="*", credentials_provider=_OnlyRanks(follower[0]))
    links, ports = [], {}
    for rank in ranks:
        link = _link(context, rank, zmq.PUSH)
        found = []
        for end in (link.orders, link.words):
            end.curve_publickey, end.curve_secretkey = keys
            end.curve_server = True
            end.bind(f"tcp://{_host(address)}:*")
            endpoint = end.getsockopt_string(zmq.LAST_ENDPOINT)
            found.append(endpoint.rsplit(":", 1)[1])
        links.append(link)
        ports[rank] = " ".join(found)
    return links, ports


def connect(context: zmq.Context, address: str, key: str, ports: str) -> Link:
    """A follower's link to rank 0."""
    require_curve()
    keys, leader = _key_pair(key, "follower"), _key_pair(key, "leader")
    link = _link(context, 0, zmq.PULL)
    for end, port in zip((link.orders, link.words), ports.split(), strict=True):
        end.curve_publickey, end.curve_secretkey = keys
        end.curve_serverkey = leader[0]
        end.connect(f"tcp://{_host(address)}:{port}")
    return link


def _link(context: zmq.Context, rank: int, kind: int) -> Link:
    orders, words = context.socket(kind), context.socket(zmq.DEALER)
    for end in (orders, words):
        end.set_hwm(0)  # a full queue would block the loop; a rank that takes nothing is found out by its beats
        end.ipv6 = True
        end.linger = 0
    return Link(rank, orders, words, words.get_monitor_socket(zmq.EVENT_DISCONNECTED))


def _key_pair(key: str, role: str) -> tuple[bytes, bytes]:
    """(public, secret), as zmq writes them."""
    secret = z85.encode(hashlib.blake2b(key.encode(), digest_size=32, person=role.encode()).digest())
    return zmq.curve_public(secret), secret


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def resolve_address(name: str, port: int, seconds: float, tell: Callable[[str], None] = lambda line: None) -> str:
    """The IP address of ``--master-addr`` as this host sees it, one that other hosts can reach where it has such.

    A name may be unknown for a while: clusters publish it as its host comes up. ``tell`` hears of it once. Raises
    ``ConfigError`` after so long.
    """
    deadline, told = time.monotonic() + seconds, False
    while True:
        try:
            found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(f"--master-addr: got {name}: {error.strerror}") from None
            if not told:
                tell(f"--master-addr: {name} has no address yet ({error.strerror}); waits up to {seconds:g} s for it")
            told = True
            time.sleep(1.0)
    addresses = [str(entry[4][0]) for entry in found]
    reachable = [address for address in addresses if not _is_loopback(address)]
    if not reachable and name != "localhost" and not _is_loopback(name):
        raise ConfigError(f"--master-addr: {name} is {addresses[0]} here, which no other host reaches; give an address")
    return (reachable or addresses)[0]


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.split("%")[0]).is_loopback
    except ValueError:  # a name
        return False


def listen_on_own(address: str, name: str, port: int) -> socket.socket:
    """Rank 0 listens on the master address alone: it must be one of this host's, and the port must be free."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--master-addr: rank 0 cannot listen on {name} ({address}), --master-port {port}: {error.strerror}"
        ) from None
    return listener
