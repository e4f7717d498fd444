"""A grid in memory, its nodes functions, its clock its own: for what no real federation can be made to do.

A node's answer to a message is a list of (seconds it takes, answer): content, an error or its code, a function that
changes the reply, or an exception that Flower raises where it cannot unpack what a node has uploaded.
"""

from itertools import compress, count

from flwr.app import Error, Message, Metadata, RecordDict

ERROR_OF_LINK = 3  # what a SuperLink answers in place of a client whose ttl has passed


class Clock:
    """Stands in for the loop's `time`: sleeping is what makes it pass."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class MemoryGrid:
    def __init__(self, nodes, clock, expires=True):
        self.nodes, self.clock, self.expires = dict(nodes), clock, expires
        self.ids, self.pushed, self.queue = count(), [], []
        self.refused, self.refusal = set(), []  # nodes that no message is taken for, and what is said instead of its id

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        taken = []
        for message in messages:
            node = message.metadata.dst_node_id
            if node in self.refused:
                taken += self.refusal
                continue
            identifier = f"message {next(self.ids)}"
            message.metadata.__dict__["_message_id"] = identifier
            self.pushed.append((self.clock.now, node, message))
            for seconds, answer in self.nodes[node](message):
                self._queue(message, answer, seconds)
            if self.expires:
                self._queue(message, ERROR_OF_LINK, message.metadata.ttl, src=1)
            taken.append(identifier)
        return taken

    def pull_messages(self, identifiers):
        """In no particular order, as Flower's. What comes with a reply that cannot be unpacked is lost."""
        asked = [one[0] <= self.clock.now and one[1] in identifiers for one in self.queue]
        due = list(compress(self.queue, asked))
        self.queue = [one for one, gone in zip(self.queue, asked, strict=True) if not gone]
        broken = [reply for _, _, reply in due if isinstance(reply, Exception)]
        if broken:
            raise broken[0]
        return [reply for _, _, reply in due][::-1]

    def _queue(self, message, answer, seconds, src=None):
        arrival, about = self.clock.now + seconds, message.metadata
        if isinstance(answer, Exception):
            self.queue.append((arrival, about.message_id, answer))
            return
        change = answer if callable(answer) else lambda reply: reply
        answer = RecordDict() if callable(answer) else answer
        answer = Error(answer, f"code {answer}") if isinstance(answer, int) else answer
        times = {"created_at": arrival, "ttl": 1.0}
        metadata = Metadata(
            1, "", src or about.dst_node_id, 1, about.message_id, "", message_type=about.message_type, **times
        )
        body = {"error": answer} if isinstance(answer, Error) else {"content": answer}
        self.queue.append((arrival, about.message_id, change(Message(metadata=metadata, **body))))
