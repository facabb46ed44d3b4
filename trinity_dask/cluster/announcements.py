"""What the Dask scheduler announces of its workers: who comes, who goes.

Invariant: every listener of a client hears every announcement, although Dask keeps only one
handler for each client.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from distributed import Client

TOPIC = "all"  # where the Dask scheduler announces workers that come and go

Listener = Callable[[dict[str, Any]], None]
_listeners: WeakKeyDictionary[Client, set[Listener]] = WeakKeyDictionary()


def listen(client: Client, listener: Listener) -> Callable[[], None]:
    """Have every announcement (``action``: ``add-worker``, ``remove-worker`` and others;
    ``worker``: its address); returns what ends it."""
    known = _listeners.get(client)
    if known is None:
        listeners = known = _listeners[client] = set()

        def forward(event: tuple[float, Any]) -> None:
            for each in list(listeners):
                if isinstance(event[1], dict):
                    each(event[1])

        client.subscribe_topic(TOPIC, forward)
    known.add(listener)

    def end() -> None:
        known.discard(listener)
        if not known and _listeners.pop(client, None) is not None:
            # or the scheduler announces the client's own departure to it
            client.unsubscribe_topic(TOPIC)

    return end
