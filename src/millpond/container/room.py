"""Memory for questions and their answers: what all exchanges of a container may hold at the same time."""

from __future__ import annotations

import threading

from millpond.errors import MessageTooLarge, Unavailable

ANSWER_BYTES_MAX = 512 << 20
"""For one exchange: its questions, its answers, and what it takes to find them."""
ROOM_SHARE = 4
"""Of a container's memory, one part in so many is for questions and answers; as much again for rows that are staged."""


class Room:
    """At most `limit` bytes. Whoever does not get what it needs lets go of all that it has, and comes again.

    So nobody waits while it holds what another waits for. No exchange gets more than half of it, nor do all those with
    the read-only token together: they may take as long as they like to receive their answers.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.share_max = min(ANSWER_BYTES_MAX, limit // 2)
        self.nbytes = 0
        self.reading_nbytes = 0
        # Held for moments, and never while anything waits: not the runtime's.
        self._lock = threading.Lock()

    def share(self, nbytes: int, reads_only: bool = False) -> Share:
        """What one exchange holds, with so many bytes of questions to begin with. To be closed."""
        share = Share(self, reads_only)
        share.claim(nbytes)
        return share

    def claim(self, share: Share, nbytes: int) -> None:
        with self._lock:
            if share.nbytes + nbytes > self.share_max:
                raise MessageTooLarge(
                    f"questions and answers of {share.nbytes + nbytes:,} bytes are beyond"
                    f" the limit of {self.share_max:,}",
                    hint="ask fewer rows at once",
                    size=share.nbytes + nbytes,
                    limit=self.share_max,
                )
            taken, limit = self.nbytes, self.limit
            if share.reads_only and self.reading_nbytes + nbytes > self.limit // 2:
                taken, limit = self.reading_nbytes, self.limit // 2
            if taken + nbytes > limit:
                raise Unavailable(
                    f"questions and answers take {taken:,} bytes here, of {limit:,} at most",
                    hint="try again in a moment, or open the pond with a larger memory=",
                    address="",
                )
            self._add(share, nbytes)

    def free(self, share: Share) -> None:
        with self._lock:
            self._add(share, -share.nbytes)

    def _add(self, share: Share, nbytes: int) -> None:
        share.nbytes += nbytes
        self.nbytes += nbytes
        self.reading_nbytes += nbytes if share.reads_only else 0


class Share:
    """What one exchange holds of the room: a `Budget`."""

    def __init__(self, room: Room, reads_only: bool) -> None:
        self.nbytes = 0
        self.reads_only = reads_only
        self._room = room

    def claim(self, nbytes: int) -> None:
        self._room.claim(self, nbytes)

    def close(self) -> None:
        """Its questions and answers are gone. Closed again, it does nothing."""
        self._room.free(self)
